"""Tensors from rank to rank: allgather, broadcast and alltoall.

The gradients of an allgather and of a broadcast are averages over the ranks, as of a loss that is the mean of the ranks' losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from toolkit.compat.horovod import runtime
from toolkit.compat.horovod.engine import Handle
from toolkit.compat.horovod.errors import refuse_value
from toolkit.compat.horovod.messages import ReduceOp
from toolkit.compat.horovod.runtime import ProcessSet, global_process_set
from toolkit.compat.horovod.submission import Grads, Tensors, new_like, refuse_scalars, submit, synchronize


def _average_async(grads: Tensors, name: str, process_set: ProcessSet) -> Handle:
    inputs = [grad.contiguous() for grad in grads]
    average = ReduceOp.AVERAGE
    return submit("allreduce", inputs, new_like(inputs), name=name, process_set=process_set, single=False, op=average)


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start `allgather`, without a gradient."""
    refuse_scalars("allgather", [tensor])
    return submit("allgather", [tensor], name=name, process_set=process_set, single=True)


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start `grouped_allgather`, without gradients."""
    refuse_scalars("allgather", tensors)
    return submit("allgather", tensors, name=name, process_set=process_set, single=False)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenate the ranks' tensors along the first dimension, which may differ.

    Collectives:
        forward: all-gather; backward: the average over the ranks of the gradient, of which each keeps its own rows.
    """
    return grouped_allgather([tensor], name, process_set)[0]


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Gather several tensors as one operation."""
    refuse_scalars("allgather", tensors)
    name = name or runtime.engine().next_name("allgather")
    return list(_Allgather.apply(name, process_set, *tensors))  # type: ignore[no-untyped-call]


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, process_set: ProcessSet, *tensors: torch.Tensor) -> Grads:
        ctx.name, ctx.process_set, ctx.rows = name, process_set, [tensor.shape[0] for tensor in tensors]
        return tuple(synchronize(grouped_allgather_async(tensors, name, process_set)))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Grads:
        name, process_set = f"{ctx.name}.gradient", ctx.process_set
        reduced = synchronize(_average_async(grads, name, process_set))
        every = synchronize(allgather_async(torch.tensor([ctx.rows]), f"{name}.rows", process_set))
        starts = every[: process_set.rank()].sum(dim=0).tolist()
        own = [grad.narrow(0, start, rows) for grad, start, rows in zip(reduced, starts, ctx.rows, strict=True)]
        return (None, None, *own)


def _broadcast(inputs: Tensors, outputs: Tensors, root_rank: int, name: str | None, process_set: ProcessSet) -> Handle:
    if process_set.included() and root_rank not in (process_set.ranks or ()):
        refuse_value("root_rank", f"root_rank={root_rank} is not in {process_set}", f"Use one of {process_set.ranks}")
    return submit("broadcast", inputs, outputs, name=name, process_set=process_set, single=True, root=root_rank)


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start `broadcast`, without a gradient."""
    return _broadcast([tensor], new_like([tensor]), root_rank, name, process_set)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start `broadcast_`."""
    return _broadcast([tensor], [tensor], root_rank, name, process_set)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Overwrite a tensor with that of global rank `root_rank`, and return it."""
    synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return tensor


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the tensor of global rank `root_rank`.

    Collectives:
        forward: broadcast; backward: the average over the ranks of the gradient, at the root, and zeros elsewhere.
    """
    name = name or runtime.engine().next_name("broadcast")
    result: torch.Tensor = _Broadcast.apply(tensor, root_rank, name, process_set)  # type: ignore[no-untyped-call]
    return result


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int, name: str, process_set: ProcessSet) -> torch.Tensor:
        ctx.options = (root_rank, name, process_set)
        result: torch.Tensor = synchronize(broadcast_async(tensor, root_rank, name, process_set))
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Grads:
        root_rank, name, process_set = ctx.options
        (reduced,) = synchronize(_average_async([grad], f"{name}.gradient", process_set))
        return (reduced if runtime.rank() == root_rank else torch.zeros_like(reduced)), None, None, None


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `alltoall`, without a gradient; the result is a pair also without splits."""
    refuse_scalars("alltoall", [tensor])
    ranks, rows = process_set.size(), tensor.shape[0]
    if splits is None:
        if rows % ranks:
            refuse_value(
                "splits",
                f"splits is left out, and {ranks} ranks do not divide the first dimension of {rows}",
                "Give the rows for each rank as splits",
            )
        counts = [rows // ranks] * ranks
    else:
        counts = [int(count) for count in (splits.tolist() if isinstance(splits, torch.Tensor) else splits)]
        if len(counts) != ranks or sum(counts) != rows or min(counts) < 0:
            refuse_value(
                "splits",
                f"splits={counts} does not share out a first dimension of {rows} among {ranks} ranks",
                f"Give {ranks} numbers of at least 0 whose sum is {rows}",
            )
    return submit("alltoall", [tensor], name=name, process_set=process_set, single=True, splits=tuple(counts))


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows of the first dimension to each rank, and return those received in the order of the ranks.

    Args:
        splits: Rows for each rank; as many for each when left out.

    Returns:
        The tensor; with `splits`, a pair of it and of the number of rows from each rank.

    Collectives:
        forward: all-to-all; backward: the gradient's rows back to where they came from.
    """
    name = name or runtime.engine().next_name("alltoall")
    output, received = _Alltoall.apply(tensor, splits, name, process_set)  # type: ignore[no-untyped-call]
    return output if splits is None else (output, received)


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, splits: Any, name: str, process_set: ProcessSet) -> Grads:
        output, received = synchronize(alltoall_async(tensor, splits, name, process_set))
        ctx.options = (received, f"{name}.gradient", process_set)
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Grads:
        output, _ = synchronize(alltoall_async(grad.contiguous(), *ctx.options))
        return output, None, None, None
