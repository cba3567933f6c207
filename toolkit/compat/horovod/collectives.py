"""What a rank does when all ranks of a process set have called an operation: torch's collectives over packed tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from toolkit.compat.horovod.messages import ReduceOp, Request, Response, TensorSpec
from toolkit.distributed.collectives import all_gather, reduce_scatter

_TORCH_OPS = {
    ReduceOp.AVERAGE: dist.ReduceOp.SUM,
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where operations of a process set are done.

    Args:
        group: Its process group.
        ranks: Its global ranks.
        rank: Global rank of this process, which is one of them.
    """

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    rank: int

    @property
    def index(self) -> int:
        """This process's rank within the set."""
        return self.ranks.index(self.rank)


Tensors = Sequence[torch.Tensor]


def allreduce(response: Response, inputs: Tensors, outputs: Tensors, *, place: Place) -> None:
    """Reduce all tensors of a response, which are of one type unless they are one group of several."""
    request = response.requests[0]
    for indices in _by_type(inputs):
        flat = _packed([inputs[index] for index in indices], [outputs[index] for index in indices])
        _unpack(_reduced(flat, request, place), [outputs[index] for index in indices])


def _reduced(flat: torch.Tensor, request: Request, place: Place) -> torch.Tensor:
    if flat.dtype == torch.bool:
        # A sum of truth values is true where any of them is, and so is their maximum.
        any_true = request.op in (ReduceOp.SUM, ReduceOp.MAX)
        number = flat.to(torch.uint8)
        dist.all_reduce(number, op=dist.ReduceOp.MAX if any_true else dist.ReduceOp.MIN, group=place.group)
        return number.to(torch.bool)
    flat = _scaled(flat, request.prescale)
    dist.all_reduce(flat, op=_TORCH_OPS[request.op], group=place.group)
    return _scaled(_averaged(flat, request.op, len(place.ranks)), request.postscale)


def _averaged(tensor: torch.Tensor, op: ReduceOp, count: int) -> torch.Tensor:
    if op != ReduceOp.AVERAGE:
        return tensor
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.div_(count)
    return tensor.div_(count, rounding_mode="floor")


def _scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    if factor == 1.0:
        return tensor
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.mul_(factor)
    return tensor.copy_(tensor.double().mul_(factor))


def broadcast(response: Response, inputs: Tensors, outputs: Tensors, *, place: Place) -> None:
    """Copy the root's tensors to all ranks."""
    root = response.requests[0].root
    for indices in _by_type(inputs):
        flat = _packed([inputs[index] for index in indices], [outputs[index] for index in indices])
        dist.broadcast(_plain(flat), src=root, group=place.group)
        _unpack(flat, [outputs[index] for index in indices])


def allgather(response: Response, inputs: Tensors, *, place: Place) -> list[torch.Tensor]:
    """Concatenate the ranks' tensors along their first dimension, in the order of the ranks."""
    gathered = []
    for tensor, rows in zip(inputs, response.rows, strict=True):
        most = max(rows)
        padded = _plain(tensor).new_zeros((most, *tensor.shape[1:]))
        padded[: tensor.shape[0]] = _plain(tensor)
        everyone = all_gather(padded, dim=0, group=place.group)
        if len(set(rows)) > 1:
            everyone = torch.cat(
                [piece[:count] for piece, count in zip(torch.split(everyone, most), rows, strict=True)]
            )
        gathered.append(everyone.view(tensor.dtype))
    return gathered


def alltoall(response: Response, inputs: Tensors, *, place: Place) -> tuple[torch.Tensor, torch.Tensor]:
    """Send each rank its rows, and return the received rows in the order of the ranks, with the number of each."""
    (tensor,) = inputs
    rows = [splits[place.index] for splits in response.splits]
    received = _plain(tensor).new_empty((sum(rows), *tensor.shape[1:]))
    dist.all_to_all_single(
        received, _plain(tensor).contiguous(), rows, list(response.splits[place.index]), group=place.group
    )
    return received.view(tensor.dtype), torch.tensor(rows, dtype=torch.int32)


def reducescatter(response: Response, inputs: Tensors, *, place: Place) -> list[torch.Tensor]:
    """Reduce the tensors, and keep this rank's part of the first dimension; the first ranks have a row more if it is uneven."""
    request = response.requests[0]
    results = []
    for tensor in inputs:
        counts = scattered_rows(tensor.shape[0], len(place.ranks))
        pieces = torch.split(_scaled(tensor.clone(memory_format=torch.contiguous_format), request.prescale), counts)
        most = max(counts)
        if tensor.is_cuda:
            padded = tensor.new_zeros((len(counts), most, *tensor.shape[1:]))
            for row, piece in zip(padded, pieces, strict=True):
                row[: piece.shape[0]] = piece
            own = reduce_scatter(padded.flatten(0, 1), dim=0, group=place.group)[: counts[place.index]]
        else:  # gloo reduces whole tensors in any case
            whole = torch.cat(pieces)
            dist.all_reduce(whole, group=place.group)
            own = torch.split(whole, counts)[place.index].clone()
        results.append(_scaled(_averaged(own, request.op, len(place.ranks)), request.postscale))
    return results


def scattered_rows(rows: int, size: int) -> list[int]:
    """Return how many rows of a reducescatter each rank keeps.

    >>> scattered_rows(5, 3)
    [2, 2, 1]
    """
    return [rows // size + (index < rows % size) for index in range(size)]


def zeros(spec: TensorSpec) -> torch.Tensor:
    """Return what a rank that has joined contributes to a sum."""
    return torch.zeros(spec.shape, dtype=spec.dtype, device=spec.device)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that every backend can send."""
    return tensor.contiguous().view(torch.uint8) if tensor.dtype == torch.bool else tensor


def _by_type(tensors: Tensors) -> list[list[int]]:
    """Return the indices of the tensors of each type, in an order that is the same on all ranks."""
    kinds: dict[tuple[torch.dtype, str], list[int]] = {}
    for index, tensor in enumerate(tensors):
        kinds.setdefault((tensor.dtype, tensor.device.type), []).append(index)
    return list(kinds.values())


def _packed(inputs: Tensors, outputs: Tensors) -> torch.Tensor:
    """Return the elements of all inputs in one tensor of one dimension: a single output's own memory, or a new tensor."""
    if len(inputs) == 1 and outputs[0].is_contiguous():
        if outputs[0] is not inputs[0]:
            outputs[0].copy_(inputs[0])
        return outputs[0].view(-1)
    return torch.cat([tensor.reshape(-1) for tensor in inputs])


def _unpack(flat: torch.Tensor, outputs: Tensors) -> None:
    if flat.data_ptr() == outputs[0].data_ptr():
        return
    pieces = torch.split(flat, [math.prod(output.shape) for output in outputs])
    for output, piece in zip(outputs, pieces, strict=True):
        output.copy_(piece.view(output.shape))
