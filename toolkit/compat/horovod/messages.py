"""Messages between a rank and the coordinator: what a rank asks for, and what all ranks of the set then do."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import torch

from toolkit.errors import Problem

Kind = Literal[
    "allreduce",
    "allgather",
    "broadcast",
    "alltoall",
    "reducescatter",
    "barrier",
    "join",
    "add_process_set",
    "remove_process_set",
]


class ReduceOp(IntEnum):
    """Reductions, with the numbers that Horovod gives them."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """The type and shape of one tensor.

    Args:
        device: `cpu` or `cuda`: each rank has a device of its own of that type.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """Describe a tensor."""
        return cls(dtype=tensor.dtype, shape=tuple(tensor.shape), device=tensor.device.type)

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor's elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)} on {self.device}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One operation that a rank has called.

    Args:
        kind: The operation.
        name: Its name; the ranks' calls of one name are one operation.
        set_id: Number of the process set.
        specs: The tensors, several in a grouped operation.
        op: Reduction of an allreduce or reducescatter.
        prescale: Factor of the tensors before the reduction.
        postscale: Factor of the result.
        root: Global rank that broadcasts.
        splits: Rows for each rank of the set in an alltoall.
        ranks: Ranks of a process set that is added.
    """

    kind: Kind
    name: str
    set_id: int = 0
    specs: tuple[TensorSpec, ...] = ()
    op: ReduceOp = ReduceOp.SUM
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    splits: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.num_bytes for spec in self.specs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """What the ranks of a process set do next.

    Args:
        requests: The operations, of one kind; several are done as one. A rank that has joined sees in them what to contribute.
        ranks: Global ranks of the set.
        rows: Of an allgather: for each of the tensors, the rows of each rank.
        splits: Of an alltoall: the splits of each rank.
        number: The rank that joined last, or the number of a new process set.
        problem: Why the operations cannot be done.
    """

    requests: tuple[Request, ...]
    ranks: tuple[int, ...] = ()
    rows: tuple[tuple[int, ...], ...] = ()
    splits: tuple[tuple[int, ...], ...] = ()
    number: int = -1
    problem: Problem | None = None

    @property
    def kind(self) -> Kind:
        """The kind of its operations."""
        return self.requests[0].kind
