"""Messages between the cards of one machine by their copy engines.

A send or receive of NCCL is a kernel that holds multiprocessors until its peer arrives. Matrix products fill a card
exactly, so beside such a kernel they take up to a tenth longer (benchmarks/results/pipeline-2xh200.jsonl). Here the sender's
copy engine writes into a buffer of the receiver, and each end waits in a kernel of one warp, which leaves room for others.

Source:
    torch distributed/_symmetric_memory: a buffer of each rank that its peers can address, with a pad of signals.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Messages of one kind that a receiver's buffer holds: one may arrive while another is copied out.
SLOTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerWork:
    """A message under way; like the work of a collective, `wait` holds up the current stream and not the host."""

    event: torch.cuda.Event

    def wait(self) -> None:
        """Let the current stream wait until the message has been sent or received."""
        torch.cuda.current_stream().wait_event(self.event)

    def is_completed(self) -> bool:
        """Whether the message has been sent or received."""
        return bool(self.event.query())  # type: ignore[no-untyped-call]


class PeerMailbox:
    """Buffers in the memory of two cards, each filled by the other one.

    Args:
        group: Group of the two ranks.
        device: This rank's card.
        max_bytes: Size of the largest message.
        kinds: Kinds of messages that this rank sends, and those that it receives; the other end has them the other way round.
        timeout_seconds: Time after which a wait ends the process.

    Collectives:
        Both ranks make their buffers together. Memory: `SLOTS` messages for each kind received, outside of torch's statistics.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        device: torch.device,
        max_bytes: int,
        kinds: tuple[Sequence[str], Sequence[str]],
        timeout_seconds: float,
    ) -> None:
        from torch._C._distributed_c10d import _SymmetricMemory

        self._sends, self._receives = (sorted(each) for each in kinds)
        self._max_bytes, self._peer, self._timeout_ms = max_bytes, 1 - group.rank(), int(timeout_seconds * 1000)
        num_slots = SLOTS * max(len(self._sends), len(self._receives))
        self._own = _SymmetricMemory.empty_strided_p2p((num_slots * max_bytes,), (1,), torch.uint8, device)
        self._handle: Any = _SymmetricMemory.rendezvous(self._own, group.group_name)
        self._sent, self._received = dict.fromkeys(self._sends, 0), dict.fromkeys(self._receives, 0)
        self._streams = {
            (kind, sends): torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            for sends, kinds_ in ((True, self._sends), (False, self._receives))
            for kind in kinds_
        }

    def holds(self, num_bytes: int) -> bool:
        """Whether a message of a size fits; both ends know its size."""
        return num_bytes <= self._max_bytes

    def send(self, tensor: torch.Tensor, kind: str) -> PeerWork:
        """Start to send a contiguous tensor, which must not be freed or overwritten before the work is done."""
        slot, number, arrived, taken = self._place(self._sends, self._sent, kind)
        stream = self._streams[kind, True]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            if number >= SLOTS:
                self._handle.wait_signal(self._peer, taken, self._timeout_ms)
            size = tensor.numel() * tensor.element_size()
            to: torch.Tensor = self._handle.get_buffer(self._peer, (size,), torch.uint8, slot * self._max_bytes)
            to.copy_(tensor.detach().view(-1).view(torch.uint8), non_blocking=True)
            self._handle.put_signal(self._peer, arrived, self._timeout_ms)
            return PeerWork(event=stream.record_event())

    def receive(self, into: torch.Tensor, kind: str) -> PeerWork:
        """Start to receive the next message of a kind into a contiguous tensor of its size."""
        slot, _, arrived, taken = self._place(self._receives, self._received, kind)
        stream = self._streams[kind, False]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._handle.wait_signal(self._peer, arrived, self._timeout_ms)
            size = into.numel() * into.element_size()
            into.view(-1).view(torch.uint8).copy_(self._own.narrow(0, slot * self._max_bytes, size))
            self._handle.put_signal(self._peer, taken, self._timeout_ms)
            return PeerWork(event=stream.record_event())

    def _place(self, kinds: Sequence[str], counts: dict[str, int], kind: str) -> tuple[int, int, int, int]:
        """Return slot and number of the next message of a kind, and the channels that say it has arrived and was taken."""
        number = counts[kind]
        counts[kind] += 1
        slot = SLOTS * kinds.index(kind) + number % SLOTS
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
