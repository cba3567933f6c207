"""Messages between the cards of one machine by their copy engines.

A send or receive of NCCL is a kernel that holds multiprocessors until its peer arrives. Matrix products fill a card
exactly, so beside such a kernel they take up to a tenth longer (benchmarks/results/pipeline-2xh200.jsonl). Here the sender's
copy engine writes into a buffer of the receiver, which waits where it needs the message, on the stream that computes. It
waits there for nothing that it has not queued before, so a kernel that CUDA loads meanwhile, for which the host waits until
all others have ended, can hold up neither end for ever.

Source:
    torch distributed/_symmetric_memory: a buffer of each rank that its peers can address, with a pad of signals.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Messages of one kind that a receiver's buffer holds at most. Under 1F1B a stage is as many ahead of the next as stages follow;
# one that is further ahead waits until the receiver has taken a message.
MAX_SLOTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSend:
    """A message being sent."""

    event: torch.cuda.Event

    def wait(self) -> None:
        """Let the current stream, not the host, wait until the message is in the receiver's buffer."""
        torch.cuda.current_stream().wait_event(self.event)

    def is_completed(self) -> bool:
        """Whether it is there."""
        return bool(self.event.query())  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerReceive:
    """A message being received."""

    take: Callable[[], None]

    def wait(self) -> None:
        """Let the current stream, not the host, wait for the message and copy it out of the buffer. To be called once."""
        self.take()


class PeerMailbox:
    """Buffers in the memory of two cards, each filled by the other one.

    Args:
        group: Group of the two ranks.
        device: This rank's card.
        max_bytes: Size of the largest message.
        kinds: Kinds of messages that this rank sends, and those that it receives; the other end has them the other way round.
        slots: Messages of each kind that the buffers hold.
        timeout_seconds: Time after which a wait ends the process.

    Collectives:
        Both ranks make their buffers together. Memory: `slots` messages for each kind received, outside of torch's statistics.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        device: torch.device,
        max_bytes: int,
        kinds: tuple[Sequence[str], Sequence[str]],
        slots: int,
        timeout_seconds: float,
    ) -> None:
        from torch._C._distributed_c10d import _SymmetricMemory
        from torch.distributed import _symmetric_memory

        self._sends, self._receives = (sorted(each) for each in kinds)
        self._max_bytes, self._peer, self._timeout_ms = max_bytes, 1 - group.rank(), int(timeout_seconds * 1000)
        self._slots = slots
        num_slots = slots * max(len(self._sends), len(self._receives))
        self._own = _SymmetricMemory.empty_strided_p2p((num_slots * max_bytes,), (1,), torch.uint8, device)
        self._handle: Any = _symmetric_memory.rendezvous(self._own, group.group_name)
        self._sent, self._received = dict.fromkeys(self._sends, 0), dict.fromkeys(self._receives, 0)
        self._streams = {kind: torch.cuda.Stream(device) for kind in self._sends}  # type: ignore[no-untyped-call]

    def holds(self, num_bytes: int) -> bool:
        """Whether a message of a size fits; both ends know its size."""
        return num_bytes <= self._max_bytes

    def send(self, tensor: torch.Tensor, kind: str) -> PeerSend:
        """Start to send a contiguous tensor, which must not be freed or overwritten before the work is done."""
        slot, number, arrived, taken = self._place(self._sends, self._sent, kind)
        stream = self._streams[kind]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            if number >= self._slots:
                self._handle.wait_signal(self._peer, taken, self._timeout_ms)
            size = tensor.numel() * tensor.element_size()
            to: torch.Tensor = self._handle.get_buffer(self._peer, (size,), torch.uint8, slot * self._max_bytes)
            to.copy_(tensor.detach().view(-1).view(torch.uint8), non_blocking=True)
            self._handle.put_signal(self._peer, arrived, self._timeout_ms)
            return PeerSend(event=stream.record_event())

    def receive(self, into: torch.Tensor, kind: str) -> PeerReceive:
        """Receive the next message of a kind into a contiguous tensor of its size, when `wait` is called."""
        slot, _, arrived, taken = self._place(self._receives, self._received, kind)

        def take() -> None:
            self._handle.wait_signal(self._peer, arrived, self._timeout_ms)
            size = into.numel() * into.element_size()
            into.view(-1).view(torch.uint8).copy_(self._own.narrow(0, slot * self._max_bytes, size))
            self._handle.put_signal(self._peer, taken, self._timeout_ms)

        return PeerReceive(take=take)

    def _place(self, kinds: Sequence[str], counts: dict[str, int], kind: str) -> tuple[int, int, int, int]:
        """Return slot and number of the next message of a kind, and the channels that say it has arrived and was taken."""
        number = counts[kind]
        counts[kind] += 1
        slot = self._slots * kinds.index(kind) + number % self._slots
        return slot, number, 2 * slot, 2 * slot + 1


def reachable_cards(device: torch.device) -> list[bool]:
    """Return for each rank of the world whether its card and this process's card can address each other.

    Collectives:
        Two `all_gather_object` over all ranks.
    """
    own = (socket.gethostname(), _boot(), str(torch.cuda.get_device_properties(device).uuid))
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    visible = {str(torch.cuda.get_device_properties(index).uuid): index for index in range(torch.cuda.device_count())}

    def reaches(other: tuple[str, str, str]) -> bool:
        index = visible.get(other[2])
        if other[:2] != own[:2] or other[2] == own[2] or index is None:
            return False
        return torch.cuda.can_device_access_peer(device, index)

    reached: list[Any] = [None] * len(found)
    dist.all_gather_object(reached, [reaches(other) for other in found])
    rank = dist.get_rank()
    return [reached[rank][other] and reached[other][rank] for other in range(len(found))]


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
