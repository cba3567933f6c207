"""Rates of optimizers on the card and on the host, and of copies between the two."""

from __future__ import annotations

import gc
import os
from typing import Any

import torch
from torch import nn

from toolkit.cost.bench.timing import MIB, Bench, noted


def optimizers(bench: Bench, out: dict[str, Any]) -> None:
    """AdamW on flat fp32 parameters: seconds, with 28 bytes an element (16 read, 12 written)."""
    count = 4096 if bench.quick else 2**29
    for name in ("deepspeed", "torch_fused", "torch_foreach"):
        with noted(out, name):
            parameter = _with_gradient(count, bench.device)
            if name == "deepspeed":
                if not bench.cuda:
                    raise RuntimeError("no card")
                from deepspeed.ops.adam import FusedAdam

                optimizer: Any = FusedAdam([parameter], lr=1e-5)
            else:
                how: dict[str, Any] = {"fused": True} if name == "torch_fused" else {"foreach": True}
                optimizer = torch.optim.AdamW([parameter], lr=1e-5, **how)
            out[name] = _rate(bench, optimizer, count, share=1.5)
        optimizer = None
        parameter = nn.Parameter(torch.empty(0))
        gc.collect()
    with noted(out, "many"):  # a list of parameters, as stage 0 has it
        parameters = [_with_gradient(count // 256, bench.device) for _ in range(256)]
        many = torch.optim.AdamW(parameters, lr=1e-5, fused=True)
        out["many"] = {"tensors": 256, **_rate(bench, many, count)}


def _with_gradient(count: int, device: Any) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(count, device=device))
    parameter.grad = torch.full_like(parameter, 1e-3)
    return parameter


def _rate(bench: Bench, optimizer: Any, count: int, **how: Any) -> dict[str, Any]:
    """Return the seconds of AdamW's step over `count` elements, of 28 bytes each."""
    seconds = bench.time(optimizer.step, **how)
    return {"elements": count, "seconds": seconds, "bytes_per_second": 28 * count / seconds}


def host_adam(bench: Bench, out: dict[str, Any]) -> None:
    """AdamW on the host: DeepSpeed's kernel and torch's; the host's memory as a copy sees it."""
    out["threads"], out["cpus"] = torch.get_num_threads(), os.cpu_count()
    count = 4096 if bench.quick else 2**27
    with noted(out, "copy"):
        source, target = torch.zeros(count), torch.ones(count)
        out["copy"] = {"bytes_per_second": 8 * count / bench.time(lambda: target.copy_(source), share=3)}
    with noted(out, "cast"):
        half = torch.ones(count, dtype=torch.bfloat16)
        out["cast"] = {"bytes_per_second": 6 * count / bench.time(lambda: target.copy_(half), share=3)}
    for name in ("deepspeed", "torch_fused"):
        with noted(out, name):
            parameter = _with_gradient(count, "cpu")
            if name == "deepspeed":
                if not bench.cuda:
                    raise RuntimeError("not compiled without a card")
                from deepspeed.ops.adam import DeepSpeedCPUAdam

                optimizer: Any = DeepSpeedCPUAdam([parameter], lr=1e-5)
            else:
                optimizer = torch.optim.AdamW([parameter], lr=1e-5, fused=True)
            out[name] = _rate(bench, optimizer, count, warm=1, share=4)


def pcie(bench: Bench, out: dict[str, Any]) -> None:
    """Bytes a second between the card and the host: pinned each way, both at once (each way), pageable."""
    if not bench.cuda:
        out["skipped"] = "no card"
        return
    size = 512 * MIB
    host_in, host_out = (torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    card_in, card_out = (torch.empty(size, dtype=torch.uint8, device=bench.device) for _ in range(2))
    one, two = (torch.cuda.Stream() for _ in range(2))  # type: ignore[no-untyped-call]

    def both() -> None:
        with torch.cuda.stream(one):
            card_in.copy_(host_in, non_blocking=True)
        with torch.cuda.stream(two):
            host_out.copy_(card_out, non_blocking=True)

    out["to_card"] = size / bench.time(lambda: card_in.copy_(host_in, non_blocking=True), share=2)
    out["to_host"] = size / bench.time(lambda: host_out.copy_(card_out, non_blocking=True), share=2)
    out["both_each"] = size / bench.time(both, share=2)
    pageable = torch.empty(size // 4, dtype=torch.uint8)
    out["pageable_to_host"] = size / 4 / bench.time(lambda: pageable.copy_(card_out[: size // 4]), share=2)
    pageable.fill_(1)
    out["pageable_to_card"] = size / 4 / bench.time(lambda: card_in[: size // 4].copy_(pageable), share=2)
