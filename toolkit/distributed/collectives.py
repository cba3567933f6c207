"""Collectives and point-to-point over an explicit group, with ranks relative to the group.

Collectives are torch's functional operators: they trace, compile, and run on fake tensors. Point-to-point is eager.

Source:
    torch csrc/distributed/c10d/Functional.cpp, the operators that DTensor calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

Reduction = Literal["sum", "max"]

_ops: Any = torch.ops._c10d_functional


def _newest(name: str, before: str) -> Any:
    return getattr(dist, name, None) or getattr(dist, before)


# torch 2.13 has renamed them, and warns of the names that 2.11 and 2.12 have. In place, with the output first.
gather_into = _newest("all_gather_single", "all_gather_into_tensor")
reduce_scatter_into = _newest("reduce_scatter_single", "reduce_scatter_tensor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """The result of a collective that may still be running: only the tensor from `wait` may be read.

    Args:
        tensor: Output of the collective.
        stacked: Number of tensors stacked in it along the first dimension.
        dim: Dimension along which to join them.
    """

    tensor: torch.Tensor
    stacked: int = 1
    dim: int = 0

    def wait(self) -> torch.Tensor:
        """Return the result; on a GPU the current stream waits, not the host."""
        done: torch.Tensor = _ops.wait_tensor(self.tensor)
        return done if self.dim == 0 else torch.cat(done.chunk(self.stacked), self.dim)


def start_all_reduce(tensor: torch.Tensor, *, group: dist.ProcessGroup, op: Reduction = "sum") -> Pending:
    """Start to reduce a tensor that the caller no longer uses: the result reuses its memory.

    Compiled code uses another operator, since in-place ones cannot be traced; inductor finds by
    itself that the memory can be reused.

    Source:
        torch _inductor/fx_passes/reinplace.py.
    """
    reduce = _ops.all_reduce if torch.compiler.is_compiling() else _ops.all_reduce_
    return Pending(tensor=reduce(tensor, op, group.group_name))


def all_reduce(tensor: torch.Tensor, *, group: dist.ProcessGroup, op: Reduction = "sum") -> torch.Tensor:
    """Return the reduction of `tensor` over the group, on each rank, as a new tensor."""
    return Pending(tensor=_ops.all_reduce(tensor.contiguous(), op, group.group_name)).wait()


def start_all_gather(tensor: torch.Tensor, *, dim: int, group: dist.ProcessGroup) -> Pending:
    """Start to join the ranks' tensors, of equal shape, along `dim` in rank order."""
    size = group.size()
    gathered = _ops.all_gather_into_tensor(tensor.contiguous(), size, group.group_name)
    return Pending(tensor=gathered, stacked=size, dim=dim % tensor.dim())


def all_gather(tensor: torch.Tensor, *, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the ranks' tensors, of equal shape, joined along `dim` in rank order."""
    return start_all_gather(tensor, dim=dim, group=group).wait()


def start_reduce_scatter(tensor: torch.Tensor, *, dim: int, group: dist.ProcessGroup) -> Pending:
    """Start to give rank r the r-th of equal chunks, along `dim`, of the sum of the ranks' tensors."""
    size = group.size()
    laid_out = tensor if dim % tensor.dim() == 0 else torch.cat(equal_pieces(tensor, size, dim=dim))
    return Pending(tensor=_ops.reduce_scatter_tensor(laid_out.contiguous(), "sum", size, group.group_name))


def reduce_scatter(tensor: torch.Tensor, *, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Return on rank r the r-th of equal chunks, along `dim`, of the sum of the ranks' tensors."""
    return start_reduce_scatter(tensor, dim=dim, group=group).wait()


def all_to_all(
    rows: torch.Tensor, *, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Return the rows, along the first dimension, that the ranks have for this one, in the order of the ranks.

    Args:
        rows: Rows for the first rank, then those for the second, and so on. Shape (S, …).
        sent: How many of them are for each rank.
        received: How many each rank has for this one.
    """
    found = _ops.all_to_all_single(rows.contiguous(), list(received), list(sent), group.group_name)
    return Pending(tensor=found).wait()


def broadcast(tensor: torch.Tensor, *, source: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the tensor of the group's rank `source`, on each rank, as a new tensor.

    Args:
        tensor: Tensor to send on `source`; on the other ranks only its shape and dtype are used.
    """
    return Pending(tensor=_ops.broadcast(tensor.contiguous(), source, group.group_name)).wait()


def send(tensor: torch.Tensor, *, to: int, group: dist.ProcessGroup) -> None:
    """Send a tensor to the group's rank `to`, which calls `receive`; return when its memory may be overwritten."""
    dist.send(tensor.contiguous(), group=group, group_dst=to)


def receive(like: torch.Tensor, *, source: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the tensor that the group's rank `source` sends, a new one of the shape, dtype and device of `like`."""
    received = torch.empty_like(like, memory_format=torch.contiguous_format)
    dist.recv(received, group=group, group_src=source)
    return received


def exchange(tensor: torch.Tensor, *, to: int, source: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Send a tensor to the group's rank `to` while receiving one of that shape and dtype from rank `source`.

    Both in one batch, so that no order of the ranks' calls deadlocks.

    Source:
        torch distributed/distributed_c10d.py batch_isend_irecv.
    """
    received = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    sending = dist.P2POp(dist.isend, tensor.contiguous(), group=group, group_peer=to)
    receiving = dist.P2POp(dist.irecv, received, group=group, group_peer=source)
    for work in dist.batch_isend_irecv([sending, receiving]):
        work.wait()
    return received


def barrier(*, group: dist.ProcessGroup) -> None:
    """Wait until each of the group's ranks has called this."""
    dist.barrier(group)


def equal_pieces(tensor: torch.Tensor, count: int, *, dim: int) -> tuple[torch.Tensor, ...]:
    """Split a tensor into `count` equal chunks along `dim`, as views.

    Raises:
        ValueError: If `count` does not divide that dim.
    """
    length = tensor.shape[dim]
    if length % count:
        raise ValueError(f"{count} ranks do not divide dim {dim} of shape {tuple(tensor.shape)}")
    return torch.split(tensor, length // count, dim)
