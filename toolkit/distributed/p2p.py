"""Point-to-point between the stages of a pipeline: one channel for each pair of ranks, direction and kind of message.

One communicator for both directions would deadlock: NCCL runs operations in order, and under 1F1B one rank sends
while its neighbour sends too. On a channel messages arrive in sending order. Between cards that can address each other's
memory, messages go by their copy engines (peer_memory.py), else through the process groups.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from toolkit.distributed.peer_memory import MAX_SLOTS, PeerMailbox, reachable_cards
from toolkit.distributed.process_groups import join_each, world_timeout
from toolkit.topology.communicators import MAX_SENDS_IN_FLIGHT, Message, Route, ends, routes
from toolkit.topology.grid import Grid


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingRecv:
    """A tensor that may still be in flight: only the one from `wait` may be read."""

    tensor: torch.Tensor
    work: Any

    def wait(self) -> torch.Tensor:
        """Return the received tensor; on a GPU the current stream waits, not the host."""
        self.work.wait()
        return self.tensor


class P2PChannels:
    """This rank's channels to the previous and the next stage.

    Args:
        grid: Grid of all ranks; those of one pipeline create their channels together.
        rank: This process's global rank.
        device: Device of its tensors.
        wraps: Whether the last stage sends activations to the first, as virtual stages do.
        max_bytes: Size of the largest message, 0 if it is not known: then all go through the process groups.

    Attributes:
        ends: Group of the first and last stages of every replica, which may share a tied weight; None on the stages between.

    Collectives:
        All ranks create a group for each of their channels and one of the ends, and one end of each channel sends the other a
        number: NCCL connects at the first message, for which both would otherwise wait in the middle of a step.
    """

    def __init__(self, grid: Grid, rank: int, *, device: torch.device, wraps: bool, max_bytes: int = 0) -> None:
        self._stages = grid.group_of(rank, "pp")
        self._own = self._stages.index(rank)
        self._bounded = not wraps
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()
        channels = routes(len(self._stages), wraps=wraps)
        pairs = [(self._stages[source], self._stages[target]) for source, target, _ in channels]
        *groups, self.ends = join_each([*pairs, ends(grid, rank)], rank=rank, messages=len(pairs))
        self._groups = {route: group for route, group in zip(channels, groups, strict=True) if group is not None}
        self._mailboxes = self._make_mailboxes(device, max_bytes) if max_bytes and dist.get_backend() == "nccl" else {}
        for route in self._groups:
            self._try(route, torch.zeros(1, device=device))

    def send(self, tensor: torch.Tensor, kind: Message, *, to: int) -> None:
        """Start to send to stage rank `to`, and wait for earlier sends beyond those that may be in flight.

        The tensor must not be overwritten before `finish`.
        """
        laid_out = tensor.contiguous()
        mailbox = self._mailbox(to, laid_out)
        if mailbox is not None:
            work: Any = mailbox.send(laid_out, kind)
        else:
            work = dist.isend(laid_out, self._stages[to], group=self._groups[self._own, to, kind])
        self._sent.append((work, laid_out))
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        if self._bounded:
            self.finish(but=MAX_SENDS_IN_FLIGHT)

    def receive(self, shape: tuple[int, ...], kind: Message, *, source: int, like: torch.Tensor) -> PendingRecv:
        """Start to receive from stage rank `source` a tensor of this shape and of the dtype and device of `like`."""
        tensor = like.new_empty(shape)
        mailbox = self._mailbox(source, tensor)
        if mailbox is not None:
            work: Any = mailbox.receive(tensor, kind)
        else:
            work = dist.irecv(tensor, self._stages[source], group=self._groups[source, self._own, kind])
        return PendingRecv(tensor=tensor, work=work)

    def _mailbox(self, peer: int, tensor: torch.Tensor) -> PeerMailbox | None:
        mailbox = self._mailboxes.get(peer)  # a batch of the caller's own may be larger than those of the plan
        return mailbox if mailbox is not None and mailbox.holds(tensor.numel() * tensor.element_size()) else None

    def _make_mailboxes(self, device: torch.device, max_bytes: int) -> dict[int, PeerMailbox]:
        """Return a mailbox for each neighbour whose memory this rank's card can address, by its stage rank."""
        reachable, made, timeout = reachable_cards(device), {}, world_timeout()
        assert timeout is not None, "a world of real cards"
        for peer in sorted({stage for source, target, _ in self._groups for stage in (source, target)} - {self._own}):
            if not reachable[self._stages[peer]]:
                continue
            kinds = tuple(
                [kind for source, target, kind in self._groups if (source, target) == ends_]
                for ends_ in ((self._own, peer), (peer, self._own))
            )
            group = next(group for (source, target, _), group in self._groups.items() if peer in (source, target))
            made[peer] = PeerMailbox(
                group,
                device=device,
                max_bytes=max_bytes,
                kinds=(kinds[0], kinds[1]),
                slots=min(len(self._stages), MAX_SLOTS) if self._bounded else MAX_SLOTS,
                timeout_seconds=timeout.total_seconds(),
            )
        return made

    def _try(self, route: Route, number: torch.Tensor) -> None:
        source, target, _ = route
        if self._own == source:
            work: Any = dist.isend(number, self._stages[target], group=self._groups[route])
        else:
            work = dist.irecv(number, self._stages[source], group=self._groups[route])
        work.wait()

    def finish(self, *, but: int = 0) -> None:
        """Wait until all sent tensors, except those of the last `but` messages, may be freed."""
        while len(self._sent) > but:
            self._sent.popleft()[0].wait()
