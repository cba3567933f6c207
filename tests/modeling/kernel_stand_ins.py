"""Torch's operations in the place of Liger's kernels, which need a card: they show which are called, with what."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from tiny_models import tiny_model, tokens
from torch.nn import functional

from toolkit.modeling.fused_kernels import RMSNorm, apply_kernels
from toolkit.tensor_parallel import linear
from toolkit.tensor_parallel.apply import apply_tensor_parallel
from toolkit.tensor_parallel.tables import tp_plan_for


def rms_norm(x: Any, weight: Any, eps: float, offset: float, casting: Any, in_place: bool) -> torch.Tensor:
    assert not in_place, "a gradient may be that of a residual too"
    return RMSNorm(offset=offset, casting=casting, epsilon=eps).of(x, weight)


def silu_product(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return functional.silu(gate) * up


def gelu_product(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return functional.gelu(gate, approximate="tanh") * up


def joined_product(both: torch.Tensor) -> torch.Tensor:
    assert both.dim() == 2, "the kernel's gradient has no other dimensions"
    return silu_product(*both.chunk(2, -1))


def package(calls: list[str]) -> dict[str, ModuleType]:
    """Gives modules for `sys.modules`; names of kernels that run are appended to `calls`."""

    def kernel(name: str, function: Any) -> Any:
        return SimpleNamespace(apply=lambda *inputs: calls.append(name) or function(*inputs))

    names = ("liger_kernel", "liger_kernel.ops", "liger_kernel.ops.fused_linear_cross_entropy")
    made = {name: ModuleType(name) for name in names}
    ops: Any = made["liger_kernel.ops"]
    ops.LigerRMSNormFunction = kernel("norm", rms_norm)
    ops.LigerSiLUMulFunction = kernel("swiglu", silu_product)
    ops.LigerGELUMulFunction = kernel("geglu", gelu_product)
    ops.LigerFusedGateUpSiLUMulFunction = kernel("joined", joined_product)
    return made


# Architecture and whether the sequence lies in pieces.
SHARDED = [("llama", False), ("llama", True), ("gemma2", False), ("gemma2", True)]


def sharded_losses(rank: int) -> list[tuple[float, float, list[str], int]]:
    """Gives the loss before and after, the kernels that ran after, and how often several columns computed at once."""
    calls: list[str] = []
    sys.modules.update(package(calls))
    columns, together = linear.column_linears, [0]

    def counted(x: torch.Tensor, specs: Any, *rest: Any, **named: Any) -> Any:
        together[0] += len(specs) > 1
        return columns(x, specs, *rest, **named)

    linear.column_linears = counted
    rows = []
    for architecture, in_pieces in SHARDED:
        model = tiny_model(architecture, num_key_value_heads=2)
        group = dist.group.WORLD
        apply_tensor_parallel(model, tp_plan_for(model), tp_group=group, sequence_parallel=in_pieces)
        eager = float(model(input_ids=tokens(), labels=tokens()).loss)
        apply_kernels(model, "liger")
        calls.clear()
        together[0] = 0
        fused = float(model(input_ids=tokens(), labels=tokens()).loss)
        rows.append((eager, fused, sorted(calls), together[0]))
    return rows
