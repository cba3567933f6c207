"""Operations on cards: over NCCL, on a stream of their own, while the script computes."""

from __future__ import annotations

import pytest
import torch
from ranks import run_on_cards

import toolkit.compat.horovod as hvd

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def on_card(rank: int) -> None:
    hvd.init()
    size = hvd.size()
    assert hvd.nccl_built() > 20000
    x = torch.full((1 << 20,), float(rank + 1), device="cuda")
    for _ in range(20):  # what is still being computed is waited for
        x = x * 1.0
    handles = [hvd.allreduce_async_(x + index, name=f"x{index}", op=hvd.Sum) for index in range(8)]
    total = size * (size + 1) / 2
    for index, handle in enumerate(handles):
        result = hvd.synchronize(handle) * 2
        assert torch.equal(result, torch.full_like(result, 2 * (total + size * index)))
        assert hvd.poll(handle)
    rows = hvd.allgather(torch.full((rank + 1, 2), rank, device="cuda"))
    assert rows.tolist() == [[other, other] for other in range(size) for _ in range(other + 1)]
    assert torch.equal(hvd.broadcast(x, size - 1), torch.full_like(x, size))
    mine = hvd.reducescatter(torch.arange(5.0, device="cuda"), op=hvd.Sum)
    whole = hvd.allgather(mine)
    assert torch.equal(whole, size * torch.arange(5.0, device="cuda"))
    sent, received = hvd.alltoall(torch.full((size,), rank, device="cuda"), splits=[1] * size)
    assert (sent.tolist(), received.tolist()) == (list(range(size)), [1] * size)
    assert hvd.allreduce(torch.tensor(rank)).item() == (size - 1) // 2, "tensors of the host go by gloo"
    assert hvd.broadcast_object("told", 0) == "told"
    net, data = torch.nn.Linear(4, 1).cuda(), torch.randn(8, 4, device="cuda")
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(net.parameters()), net.named_parameters(), compression=hvd.Compression.fp16
    )
    for _ in range(3 - (rank == size - 1 and size > 1)):
        optimizer.zero_grad()
        net(data).square().mean().backward()
        optimizer.step()
    hvd.join()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    norm = hvd.SyncBatchNorm(4).cuda()
    norm(data).sum().backward()
    hvd.shutdown()


@pytest.mark.parametrize("size", [1, 2])
def test_operations_on_cards(size):
    run_on_cards(on_card, size, num_cards=torch.cuda.device_count())
