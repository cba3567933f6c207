"""Reductions over the ranks of whose result each has its part.

The gradient is that of a loss that is the mean of the ranks' losses.
"""

from __future__ import annotations

from typing import Any

import torch

from toolkit.compat.horovod import runtime
from toolkit.compat.horovod.compression import Compression
from toolkit.compat.horovod.engine import Handle
from toolkit.compat.horovod.exchanges import grouped_allgather_async
from toolkit.compat.horovod.messages import ReduceOp
from toolkit.compat.horovod.reductions import Average, Sum, resolve_reduction
from toolkit.compat.horovod.runtime import ProcessSet, global_process_set
from toolkit.compat.horovod.submission import Grads, Tensors, refuse_scalars, submit, synchronize, tensors_of


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp | None = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start `reducescatter`, without a gradient."""
    return _reducescatter([tensor], name, op, process_set, prescale_factor, postscale_factor, single=True)


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: ReduceOp | None = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start `grouped_reducescatter`, without gradients."""
    return _reducescatter(tensors, name, op, process_set, prescale_factor, postscale_factor, single=False)


def _reducescatter(
    tensors: Tensors,
    name: str | None,
    op: ReduceOp | None,
    process_set: ProcessSet,
    prescale: float,
    postscale: float,
    *,
    single: bool,
) -> Handle:
    refuse_scalars("reducescatter", tensors)
    reduction = resolve_reduction(op, None, allowed=(Average, Sum))
    return submit(
        "reducescatter",
        tensors,
        name=name,
        process_set=process_set,
        single=single,
        op=reduction,
        prescale=float(prescale),
        postscale=float(postscale),
    )


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Any] = Compression.none,
    op: ReduceOp | None = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce a tensor over the ranks, of which each keeps its part of the first dimension.

    Where the ranks do not divide that dimension, the first ones keep a row more.

    Collectives:
        forward: reduce-scatter; backward: all-gather, of a sum times the number of ranks.
    """
    return grouped_reducescatter([tensor], name, compression, op, process_set, prescale_factor, postscale_factor)[0]


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: type[Any] = Compression.none,
    op: ReduceOp | None = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Reduce and scatter several tensors as one operation."""
    reduction = resolve_reduction(op, None, allowed=(Average, Sum))
    packed = [compression.compress(tensor) for tensor in tensors_of(tensors)]
    name = name or runtime.engine().next_name("reducescatter")
    options = (name, reduction, process_set, prescale_factor, postscale_factor)
    reduced = _Reducescatter.apply(*options, *(tensor for tensor, _ in packed))  # type: ignore[no-untyped-call]
    return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, packed, strict=True)]


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        name: str,
        op: ReduceOp,
        process_set: ProcessSet,
        prescale: float,
        postscale: float,
        *tensors: torch.Tensor,
    ) -> Grads:
        ctx.name, ctx.process_set = name, process_set
        ctx.factor = prescale * postscale * (process_set.size() if op == Sum else 1)
        return tuple(synchronize(_reducescatter(tensors, name, op, process_set, prescale, postscale, single=False)))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Grads:
        scaled = [(grad * ctx.factor).contiguous() for grad in grads]
        whole = synchronize(grouped_allgather_async(scaled, f"{ctx.name}.gradient", ctx.process_set))
        return (None, None, None, None, None, *whole)
