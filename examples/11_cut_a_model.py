"""Cuts a Hugging Face model of your own into the stages of a pipeline, in a loop of plain torch, and compares it with the whole one.

Each process holds some of the layers; with `--tensor` several processes share each of them. Shard first, cut second:

    torchrun --standalone --nproc-per-node 2 examples/11_cut_a_model.py
    torchrun --standalone --nproc-per-node 4 examples/11_cut_a_model.py --tensor 2

prints for each step the loss of the pipeline and that of the whole model, which the last process trains beside it; they are
equal to the rounding. One micro-batch passes at a time, so the other stages idle: a job with `parallel: {pipeline: 2}` has
schedules that fill them, ZeRO, checkpoints and export (example 10).
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

import toolkit as tk

CONFIG = LlamaConfig(
    vocab_size=300, hidden_size=64, intermediate_size=192, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=4, use_cache=False,
)  # fmt: skip
STEPS, BATCH, LENGTH = 8, 4, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensor", type=int, default=1, help="processes that share each layer")
    tensor = parser.parse_args().tensor

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count()) if torch.cuda.is_available() else "cpu"
    stage, num_stages = dist.get_rank() // tensor, dist.get_world_size() // tensor
    torch.manual_seed(0)  # all processes begin with one model
    whole = AutoModelForCausalLM.from_config(CONFIG).to(device)
    model = copy.deepcopy(whole)
    if tensor > 1:  # neighbours share layers: they send each other the most
        tp_group, _ = dist.new_subgroups(group_size=tensor)
        tk.tensor_parallel.apply_tensor_parallel(model, tk.tensor_parallel.tp_plan_for(model), tp_group=tp_group)
    num_layers = CONFIG.num_hidden_layers
    layers = range(stage * num_layers // num_stages, (stage + 1) * num_layers // num_stages)
    tk.pipeline.split_model(model, tk.pipeline.StageSpec(chunks=(layers,), num_layers=num_layers))
    is_last = dist.get_rank() == dist.get_world_size() - 1
    if is_last:
        held, count = (sum(p.numel() for p in one.parameters()) for one in (model, whole))
        print(f"stage {stage} holds layers {layers.start} to {layers.stop - 1}, {held:,} of {count:,} parameters")
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.5) for one in (model, whole)]
    draw = torch.Generator().manual_seed(1)  # and sees the same batches
    for step in range(STEPS):
        ids = torch.randint(0, 20, (BATCH, LENGTH), generator=draw).to(device)
        batch = {"input_ids": ids, "labels": ids}
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = forward_and_backward(model, batch, behind=tensor, first=stage == 0, last=stage == num_stages - 1)
        if is_last:
            beside = whole(**batch).loss
            beside.backward()
            print(f"step {step + 1} loss {float(loss):.5f} whole {float(beside.detach()):.5f}")
        for optimizer in optimizers:
            optimizer.step()
    dist.destroy_process_group()


def forward_and_backward(model: Any, batch: dict[str, torch.Tensor], *, behind: int, first: bool, last: bool) -> Any:
    """Passes a micro-batch through this stage and its gradient back; the neighbours are `behind` ranks away.

    Returns the loss on the last stage, and None on the others.
    """
    rank, received = dist.get_rank(), None
    if not first:
        received = torch.empty(
            tk.pipeline.hidden_shape(model, batch),
            dtype=tk.pipeline.hidden_dtype(model),
            device=batch["input_ids"].device,
        )
        dist.recv(received, src=rank - behind)
    output = tk.pipeline.forward_stage(model, batch, received=received)  # labels are read on the last stage alone
    if last:
        output.loss.backward()
    else:
        dist.send(output.detach(), dst=rank + behind)
        gradient = torch.empty_like(output)
        dist.recv(gradient, src=rank + behind)
        output.backward(gradient)
    if received is not None:
        assert received.grad is not None, "forward_stage has made it require one"
        dist.send(received.grad, dst=rank - behind)
    return output.loss.detach() if last else None


if __name__ == "__main__":
    main()
