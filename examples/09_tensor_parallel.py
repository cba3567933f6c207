"""Shards the layers of a Hugging Face model over processes, in a loop of plain torch, and compares it with the dense model.

Each process holds its part of every layer and sees the same batch:

    torchrun --standalone --nproc-per-node 2 examples/09_tensor_parallel.py
    torchrun --standalone --nproc-per-node 2 examples/09_tensor_parallel.py --sequence-parallel

prints for each step the loss of the sharded model and that of the dense one, which the first process trains beside it; they
are equal to the rounding. A job does the same by `parallel: {tensor: 2}`, with the DeepSpeed engine, checkpoints and export.
An architecture that `tp_plan_for` does not know is refused with a table to complete.
"""

from __future__ import annotations

import argparse
import copy

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

import toolkit as tk

CONFIG = LlamaConfig(
    vocab_size=300, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=8,
    num_key_value_heads=4, use_cache=False,
)  # fmt: skip
STEPS, BATCH, LENGTH = 8, 4, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequence-parallel", action="store_true", help="share norms and residuals too, by pieces")
    options = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count()) if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)  # all processes begin with one model
    dense = AutoModelForCausalLM.from_config(CONFIG).to(device)
    sharded = copy.deepcopy(dense)
    assert dist.group.WORLD is not None, "init_process_group has run"
    tk.tensor_parallel.apply_tensor_parallel(
        sharded,
        tk.tensor_parallel.tp_plan_for(sharded),
        tp_group=dist.group.WORLD,
        sequence_parallel=options.sequence_parallel,
    )
    if dist.get_rank() == 0:
        held, whole = (sum(p.numel() for p in model.parameters()) for model in (sharded, dense))
        print(f"each of {dist.get_world_size()} processes holds {held:,} of {whole:,} parameters")
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in (sharded, dense)]
    draw = torch.Generator().manual_seed(1)  # and sees the same batches
    for step in range(STEPS):
        ids = torch.randint(0, 20, (BATCH, LENGTH), generator=draw).to(device)
        losses = []
        for model, optimizer in zip((sharded, dense), optimizers, strict=True):
            loss = model(input_ids=ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        if dist.get_rank() == 0:
            print(f"step {step + 1} loss {losses[0]:.5f} dense {losses[1]:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
