"""One test per operation: the result is right only if the right ranks took part, in the right order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from toolkit.distributed.collectives import (
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    exchange,
    receive,
    reduce_scatter,
    send,
    start_all_reduce,
)
from toolkit.distributed.diagnose.blocked_ranks import Step
from toolkit.distributed.diagnose.hang_detection import ProgressStore

_BANDWIDTH_BYTES = 64 * 2**20
_WARM_UP_ROUNDS, _TIMED_ROUNDS = 2, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMember:
    """A rank in one of its groups.

    Args:
        kind: Kind of the group.
        ranks: Global ranks of the group, from the grid.
        rank: Global rank of this process.
        world_size: Number of ranks of the world.
        group: torch's process group of them.
        device: Device of this rank's tensors.
        board: Board with the progress of all ranks.
    """

    kind: str
    ranks: tuple[int, ...]
    rank: int
    world_size: int
    group: dist.ProcessGroup
    device: torch.device
    board: ProgressStore

    @property
    def position(self) -> int:
        """Rank within the group, by the grid."""
        return self.ranks.index(self.rank)

    def tensor(self, values: Sequence[int]) -> torch.Tensor:
        """Return whole numbers as a tensor on this rank's device."""
        return torch.tensor(values, dtype=torch.int64, device=self.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation over a group.

    Args:
        name: Name in tables and errors.
        run: Runs this rank's part; returns the result and the one expected from the grid.
    """

    name: str
    run: Callable[[GroupMember], tuple[list[int], list[int]]]


def _membership(member: GroupMember) -> tuple[list[int], list[int]]:
    """Sum one-hot vectors of the global ranks, so that the sum shows which ranks took part, and how often."""
    own = torch.zeros(member.world_size, dtype=torch.int64, device=member.device)
    own[member.rank] = 1
    summed = all_reduce(own, group=member.group)
    # As ranks, which are clearer than a vector of zeros and ones.
    counted = [rank for rank, times in enumerate(summed.tolist()) for _ in range(times)]
    return counted, list(member.ranks)


def _order(member: GroupMember) -> tuple[list[int], list[int]]:
    return all_gather(member.tensor([member.rank]), dim=0, group=member.group).tolist(), list(member.ranks)


def _pieces(member: GroupMember) -> tuple[list[int], list[int]]:
    """Reduce-scatter chunks: chunk p of rank r is r × n + p, so the p-th rank gets n × the sum of ranks, and n × p."""
    size = len(member.ranks)
    whole = member.tensor([member.rank * size + piece for piece in range(size)])
    expected = size * sum(member.ranks) + size * member.position
    return reduce_scatter(whole, dim=0, group=member.group).tolist(), [expected]


def _from_last(member: GroupMember) -> tuple[list[int], list[int]]:
    last = len(member.ranks) - 1
    return broadcast(member.tensor([member.rank]), source=last, group=member.group).tolist(), [member.ranks[last]]


def _along_the_line(member: GroupMember) -> tuple[list[int], list[int]]:
    """Pass a sum along the group, each rank adding itself, like activations of a pipeline."""
    place, line = member.position, member.tensor([0])
    if place > 0:
        line = receive(line, source=place - 1, group=member.group)
    line = line + member.rank
    if place < len(member.ranks) - 1:
        send(line, to=place + 1, group=member.group)
    return line.tolist(), [sum(member.ranks[: place + 1])]


def _round_the_ring(member: GroupMember) -> tuple[list[int], list[int]]:
    place, size = member.position, len(member.ranks)
    if size == 1:  # no peer, and NCCL cannot send to the same rank outside a group call
        return [member.rank], [member.rank]
    before, after = (place - 1) % size, (place + 1) % size
    received = exchange(member.tensor([member.rank]), to=after, source=before, group=member.group)
    return received.tolist(), [member.ranks[before]]


def _nobody_early(member: GroupMember) -> tuple[list[int], list[int]]:
    """Check that after the barrier the next rank has entered it; together the ranks check all of the group."""
    barrier(group=member.group)
    after = member.ranks[(member.position + 1) % len(member.ranks)]
    came = Step(kind=member.kind, operation=_BARRIER).name in member.board.place(after).entered
    return [after] if came else [], [after]


_BARRIER = "barrier"
OPERATIONS = (
    Operation(name="all-reduce", run=_membership),
    Operation(name="all-gather", run=_order),
    Operation(name="reduce-scatter", run=_pieces),
    Operation(name="broadcast", run=_from_last),
    Operation(name="send-receive", run=_along_the_line),
    Operation(name="exchange", run=_round_the_ring),
    Operation(name=_BARRIER, run=_nobody_early),
)


def bus_bandwidth(member: GroupMember) -> float:
    """Return the bus bandwidth of an all-reduce, 10^9 bytes/s.

    Source:
        NVIDIA nccl-tests, doc/PERFORMANCE.md.
    """
    tensor = torch.zeros(_BANDWIDTH_BYTES // 4, dtype=torch.float32, device=member.device)
    start, end = _timer(), _timer()
    for index in range(_WARM_UP_ROUNDS + _TIMED_ROUNDS):
        if index == _WARM_UP_ROUNDS:
            start.record()
        start_all_reduce(tensor, group=member.group).wait()
    end.record()
    end.synchronize()
    seconds = float(start.elapsed_time(end)) / 1000 / _TIMED_ROUNDS
    size = len(member.ranks)
    return 2 * (size - 1) / size * _BANDWIDTH_BYTES / seconds / 1e9


def _timer() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
