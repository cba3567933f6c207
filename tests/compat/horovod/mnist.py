"""A script as users of Horovod write them: it knows nothing of the toolkit."""

import argparse
import json
from pathlib import Path

import helper
import horovod.torch as hvd
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--out", required=True)
args = parser.parse_args()

hvd.init()
torch.manual_seed(hvd.rank())
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if device.type == "cuda":
    torch.cuda.set_device(hvd.local_rank())

model = helper.Net().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.5)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=compression, op=hvd.Average
)
data = TensorDataset(*helper.digits())
sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)


def average(value, name):
    return hvd.allreduce(torch.tensor(value), name=name).item()


losses = []
for epoch in range(args.epochs):
    model.train()
    sampler.set_epoch(epoch)
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(average(loss.item(), "loss"))
if hvd.rank() == 0:
    print(f"{len(losses)} steps on {hvd.size()} ranks")
    Path(args.out).write_text(json.dumps(losses))
