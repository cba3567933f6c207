"""Reductions over the ranks whose result all of them have: allreduce and sparse allreduce.

The gradient of an average is the average of the ranks' gradients, and that of a sum their sum.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from toolkit.compat.horovod import runtime
from toolkit.compat.horovod.compression import Compression
from toolkit.compat.horovod.engine import Handle
from toolkit.compat.horovod.errors import NotBuiltError, not_built, refuse_value
from toolkit.compat.horovod.exchanges import grouped_allgather_async
from toolkit.compat.horovod.messages import ReduceOp
from toolkit.compat.horovod.runtime import ProcessSet, global_process_set
from toolkit.compat.horovod.submission import Grads, Tensors, new_like, submit, synchronize, tensors_of

Average, Sum, Adasum = ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM
Min, Max, Product = ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT


def resolve_reduction(op: ReduceOp | None, average: bool | None, *, allowed: Sequence[ReduceOp]) -> ReduceOp:
    """Return the reduction that `op`, or its older name `average`, asks for: an average if both are left out.

    Raises:
        HorovodValueError: HOROVOD_ARGUMENT, for both at once or a reduction that is not allowed.
        NotBuiltError: HOROVOD_NOT_BUILT, for Adasum.
    """
    if average is not None:
        if op is not None:
            refuse_value("average", f"average={average} and op={op.name.capitalize()} are both given", "Give op alone")
        warnings.warn("average is deprecated: give op=hvd.Average or op=hvd.Sum", DeprecationWarning, stacklevel=4)
        return Average if average else Sum
    if op is None:
        return Average
    if op == Adasum:
        raise NotBuiltError(not_built("op=hvd.Adasum", "Use hvd.Average, with the learning rate of an average"))
    if op not in allowed:
        names = ", ".join(f"hvd.{one.name.capitalize()}" for one in allowed)
        refuse_value("op", f"op={op!r} is not a reduction of this operation", f"Use one of {names}")
    return ReduceOp(op)


_ALL = (Average, Sum, Min, Max, Product)


def _allreduce(
    inputs: Tensors,
    outputs: Tensors,
    *,
    average: bool | None,
    name: str | None,
    op: ReduceOp | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    single: bool,
) -> Handle:
    reduction = resolve_reduction(op, average, allowed=_ALL)
    for tensor in tensors_of(inputs):
        if tensor.dtype == torch.bool and (reduction == Average or (prescale, postscale) != (1.0, 1.0)):
            refuse_value(
                "tensor",
                "a tensor of truth values is averaged or scaled",
                "Convert it by tensor.float(), or use op=hvd.Sum",
            )
    return submit(
        "allreduce",
        inputs,
        outputs,
        name=name,
        process_set=process_set,
        single=single,
        op=reduction,
        prescale=float(prescale),
        postscale=float(postscale),
    )


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `allreduce`, without a gradient; the tensor must not be changed before the end."""
    return _allreduce(
        [tensor],
        new_like([tensor]),
        average=average,
        name=name,
        op=op,
        prescale=prescale_factor,
        postscale=postscale_factor,
        process_set=process_set,
        single=True,
    )


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `allreduce_`."""
    return grouped_allreduce_async_(
        [tensor], average, name, op, prescale_factor, postscale_factor, process_set, _single=True
    )


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce a tensor over the ranks in place, and return it."""
    synchronize(allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set))
    return tensor


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Any] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce a tensor over the ranks, by their average unless `op` says otherwise.

    Args:
        average: Older name of `op`: True for an average, False for a sum.
        name: The ranks' calls of one name are one operation; without it, each rank's n-th call is.
        compression: `Compression.none` or `Compression.fp16`.
        op: Average, Sum, Min, Max or Product.
        prescale_factor: Factor of each rank's tensor.
        postscale_factor: Factor of the result.
        process_set: Ranks that take part.

    Collectives:
        forward: all-reduce; backward, of averages and sums: the same reduction of the gradient.
    """
    (result,) = grouped_allreduce(
        [tensor], average, name, compression, op, prescale_factor, postscale_factor, process_set
    )
    return result


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `grouped_allreduce`, without gradients."""
    return _allreduce(
        tensors,
        new_like(tensors),
        average=average,
        name=name,
        op=op,
        prescale=prescale_factor,
        postscale=postscale_factor,
        process_set=process_set,
        single=False,
    )


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    _single: bool = False,
) -> Handle:
    """Start `grouped_allreduce_`."""
    return _allreduce(
        tensors,
        tensors,
        average=average,
        name=name,
        op=op,
        prescale=prescale_factor,
        postscale=postscale_factor,
        process_set=process_set,
        single=_single,
    )


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce several tensors in place as one operation, and return them."""
    synchronize(grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set))
    return list(tensors)


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Any] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce several tensors as one operation; arguments and gradients are those of `allreduce`."""
    reduction = resolve_reduction(op, average, allowed=_ALL)
    packed = [compression.compress(tensor) for tensor in tensors_of(tensors)]
    name = name or runtime.engine().next_name("allreduce")
    options = (name, reduction, prescale_factor, postscale_factor, process_set)
    reduced = _Allreduce.apply(*options, *(tensor for tensor, _ in packed))  # type: ignore[no-untyped-call]
    return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, packed, strict=True)]


class _Allreduce(torch.autograd.Function):
    """All-reduce whose backward is the same reduction of the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        name: str,
        op: ReduceOp,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
        *tensors: torch.Tensor,
    ) -> Grads:
        ctx.options = (name, op, prescale, postscale, process_set)
        handle = grouped_allreduce_async(tensors, None, name, op, prescale, postscale, process_set)
        return tuple(synchronize(handle))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Grads:
        name, op, prescale, postscale, process_set = ctx.options
        if op not in (Average, Sum):
            fix = "Detach the tensor, or reduce it by hvd.Average or hvd.Sum"
            raise NotBuiltError(not_built(f"the gradient of an allreduce with {op.name.capitalize()}", fix))
        reduced = grouped_allreduce(
            [grad.contiguous() for grad in grads],
            None,
            f"{name}.gradient",
            Compression.none,
            op,
            prescale,
            postscale,
            process_set,
        )
        return (None, None, None, None, None, *reduced)


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: ReduceOp, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Start an average or a sum of a sparse tensor; the result of calling what is returned, or of `synchronize` of it.

    Collectives:
        An all-gather of the indices and of the values, as one operation.
    """
    reduction = resolve_reduction(op, None, allowed=(Average, Sum))
    given = [tensor._indices().t().contiguous(), tensor._values()]
    handle = grouped_allgather_async(given, name, process_set)

    def finish() -> torch.Tensor:
        indices, values = synchronize(handle)
        if reduction == Average:
            values = values / process_set.size()
        return torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=False)

    return finish
