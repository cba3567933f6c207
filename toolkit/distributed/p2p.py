"""Point-to-point between the stages of a pipeline: for each pair of ranks, direction and kind of message a channel of its own.

One communicator for both directions would deadlock: NCCL runs what it is given in order, and under 1F1B one rank sends
while its neighbour sends too. On a channel messages arrive in the order in which they were sent.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist

from toolkit.distributed.process_groups import join_each
from toolkit.topology.grid import Grid

Message = Literal["activation", "gradient"]

# Messages that may still be under way when a rank goes on. The host gives out work faster than cards do it: what is sent
# would pile up, did the stream that computes not wait. No schedule of whole ranks ever waits for that in vain, as
# `simulate` shows; with virtual stages some do, so they wait only at the end of a step.
MAX_SENDS_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingRecv:
    """A tensor that may still be on its way: only `wait` gives one that may be read."""

    tensor: torch.Tensor
    work: Any

    def wait(self) -> torch.Tensor:
        """Return what was sent; on a card the current stream waits, not the host."""
        self.work.wait()
        return self.tensor


class P2PChannels:
    """This rank's channels to the stages before and behind its own.

    Args:
        grid: All ranks; those of one pipeline make their channels together.
        rank: This process's global rank.
        device: Where its tensors live.
        wraps: Whether the last stage sends activations to the first, as virtual stages do.

    Attributes:
        ends: The first and the last stage of every replica, which may hold one weight; None on those between.

    Collectives:
        All ranks make a group for each channel of theirs and one of the ends, and one end of a channel sends the other a number: NCCL connects them at the
        first message, for which both would otherwise wait in the middle of a step.
    """

    def __init__(self, grid: Grid, rank: int, *, device: torch.device, wraps: bool) -> None:
        self._stages = grid.group_of(rank, "pp")
        self._own = self._stages.index(rank)
        self._bounded = not wraps
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()
        routes = _routes(len(self._stages), wraps=wraps)
        pairs = [(self._stages[source], self._stages[target]) for source, target, _ in routes]
        *groups, self.ends = join_each([*pairs, _ends(grid, rank)], rank=rank)
        self._groups = {route: group for route, group in zip(routes, groups, strict=True) if group is not None}
        for route in self._groups:
            self._try(route, torch.zeros(1, device=device))

    def send(self, tensor: torch.Tensor, kind: Message, *, to: int) -> None:
        """Starts to send to stage rank `to`, and waits for what was sent before, but for what may be under way.

        The tensor must not be written to before `finish`.
        """
        group = self._groups[self._own, to, kind]
        laid_out = tensor.contiguous()
        work = dist.isend(laid_out, self._stages[to], group=group)
        self._sent.append((work, laid_out))
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        if self._bounded:
            self.finish(but=MAX_SENDS_IN_FLIGHT)

    def receive(self, shape: tuple[int, ...], kind: Message, *, source: int, like: torch.Tensor) -> PendingRecv:
        """Starts to receive from stage rank `source` a tensor of this shape and of the dtype and device of `like`."""
        tensor = like.new_empty(shape)
        work = dist.irecv(tensor, self._stages[source], group=self._groups[source, self._own, kind])
        return PendingRecv(tensor=tensor, work=work)

    def _try(self, route: tuple[int, int, Message], number: torch.Tensor) -> None:
        source, target, kind = route
        if self._own == source:
            self.send(number, kind, to=target)
            self.finish()
        else:
            self.receive((1,), kind, source=source, like=number).wait()

    def finish(self, *, but: int = 0) -> None:
        """Waits until everything that was sent, but for the last so many messages, may be freed."""
        while len(self._sent) > but:
            self._sent.popleft()[0].wait()


def _ends(grid: Grid, rank: int) -> list[int]:
    """Return the first and the last stage of all pipelines that have this rank's place in their tensor groups."""
    own = grid.coordinate(rank)
    return [grid.rank(replace(own, pp=pp, dp=dp)) for pp in (0, grid.pp - 1) for dp in range(grid.dp)]


def _routes(num_stages: int, *, wraps: bool) -> list[tuple[int, int, Message]]:
    """Return who sends what to whom, in an order that is the same on every rank."""
    pairs = [(stage, stage + 1) for stage in range(num_stages - 1)]
    if wraps:
        pairs.append((num_stages - 1, 0))
    forward: list[tuple[int, int, Message]] = [(first, second, "activation") for first, second in pairs]
    return [*forward, *((second, first, "gradient") for first, second in pairs)]
