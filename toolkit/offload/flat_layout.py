"""Where each weight of a flat parameter group stands: whose partition it is in, which device steps it, and in which piece.

ZeRO-1 and 2 keep the weights of a parameter group in one flat tensor, of which each data-parallel rank steps a partition. The card may
step the first elements of each partition, and the host steps the others:

    flat group    | partition of rank 0        | partition of rank 1        | ...
    stepped by    | card | host                | card | host                |
    pieces        |  0   |   1   |      2      |  3   |       4       |  5  |

A piece is what one rank steps at once. It belongs to one partition and one device, and to one unit of the model (`model_units`), so that a
forward pass can wait for the weights that it reads next; `planning.offload.PIECE` is the most elements that it has.

The card's memory of what is stepped is here too: fp32 state and gradients of the elements that it steps itself, and, where the flat weights
are in host memory, the copies of those weights that are in no streamed layer.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from toolkit.distributed.deepspeed_private import OffloadedPartitions
from toolkit.offload.model_units import units_of
from toolkit.planning.offload import PIECE


@dataclass(slots=True, kw_only=True, eq=False)
class Piece:
    """A range of a flat group's weights that one rank steps at once.

    Args:
        group: Number of the parameter group.
        owner: Rank of the data-parallel group that steps it.
        start: First element, in the whole flat group.
        place: The same in the owner's partition.
        numel: Number of elements.
        unit: Unit of the model that reads it.
        card: The card's memory of these weights; None for those of layers that are streamed.
        by_card: Whether the card steps it, which has its state.
        stepped: Set once the host has stepped it and its copy to the card is queued, or the card's step is.
        returned: CUDA event of that copy, or step.
        sent: Its broadcast to the other ranks.
    """

    group: int
    owner: int
    start: int
    place: int
    numel: int
    unit: int
    card: Tensor | None
    by_card: bool
    stepped: threading.Event = field(default_factory=threading.Event)
    returned: Any = None
    sent: Any = None


class FlatLayout:
    """The flat parameter groups of DeepSpeed's optimizer, cut into partitions and pieces.

    Args:
        partitions: DeepSpeed's optimizer.
        host_share: Share of each partition that the host steps; the card steps the first elements.
        in_host: Whether the flat weights are in host memory, and the card has copies.
        device: Device that computes.

    Attributes:
        num_ranks: Ranks of the data-parallel group.
        rank: This one's number there.
        by_card: Elements of each group's partitions that the card steps.
        by_host: Those that the host steps.
        copied: What the card has a copy of for as long as the run lasts; found by `cut`, if the flat weights are in host memory.
    """

    def __init__(
        self, partitions: OffloadedPartitions, *, host_share: float, in_host: bool, device: torch.device
    ) -> None:
        self._of, self._in_host, self._device = partitions, in_host, device
        self.num_ranks, self.rank = dist.get_world_size(partitions.dp_group), dist.get_rank(partitions.dp_group)
        sizes = [self.partition_size(group) for group in range(len(partitions.flats))]
        self.by_card = [round((1 - host_share) * size) for size in sizes]
        self.by_host = [size - kept for size, kept in zip(sizes, self.by_card, strict=True)]
        self.copied: list[CopiedRun] = []

    def partition_size(self, group: int) -> int:
        """Return the elements of each partition of a group."""
        return self._of.flats[group].numel() // self.num_ranks

    def num_on_card(self, group: int, place: int, numel: int) -> int:
        """Return how many elements the card steps of a part of a partition, which are its first ones."""
        return min(numel, max(0, self.by_card[group] - place))

    def weights_by_host(self, group: int) -> Tensor:
        """Return the flat weights of this rank's partition of a group that the host steps."""
        numel = self.by_host[group]
        return self._of.flats[group].narrow(0, (self.rank + 1) * self.partition_size(group) - numel, numel)

    def weights_of(self, piece: Piece) -> Tensor:
        """Return the flat weights of a piece."""
        return self._of.flats[piece.group].narrow(0, piece.start, piece.numel)

    def cut(self, model: nn.Module, streamed: Container[object]) -> list[Piece]:
        """Return the pieces of all ranks, in the order in which a forward pass reads them.

        Args:
            model: The model whose weights they are.
            streamed: Weights of which the card has no lasting copy, where the flat weights are in host memory.
        """
        return sorted(self._pieces(model, streamed), key=lambda piece: (piece.unit, piece.group, piece.start))

    def _pieces(self, model: nn.Module, streamed: Container[object]) -> Iterator[Piece]:
        """Yield runs of parameters of one unit, cut at partitions, where the host's elements begin, and at `PIECE`."""
        unit_of = units_of(model)
        for group, flat in enumerate(self._of.flats):
            partition = self.partition_size(group)
            kinds = [
                (offset, (unit_of[weight], self._in_host and weight in streamed))
                for weight, offset in self._of.offsets(group)
            ]
            for first, end, (unit, is_streamed) in _joined([*kinds, (flat.numel(), None)]):
                card, start = None if is_streamed else self._on_card(group, first, end), first
                while start < end:
                    owner = start // partition
                    border = owner * partition + self.by_card[group]
                    by_card = start < border
                    stop = min(end, start + PIECE, border if by_card else (owner + 1) * partition)
                    yield Piece(
                        group=group,
                        owner=owner,
                        start=start,
                        place=start - owner * partition,
                        numel=stop - start,
                        unit=unit,
                        card=None if card is None else card.narrow(0, start - first, stop - start),
                        by_card=by_card,
                    )
                    start = stop

    def _on_card(self, group: int, start: int, end: int) -> Tensor:
        """Return the card's memory of a run of weights, made now if the flat weights are on the host."""
        host = self._of.flats[group].narrow(0, start, end - start)
        if not self._in_host:
            return host
        card = torch.empty_like(host, device=self._device)
        weights = [(weight, offset) for weight, offset in self._of.offsets(group) if start <= offset < end]
        self.copied.append(
            CopiedRun(
                host=host,
                card=card,
                weights=tuple(weight for weight, _ in weights),
                places=tuple(offset - start for _, offset in weights),
            )
        )
        return card


class CardState:
    """The state of the first elements of a group's partition, which the card steps: fp32 weights, both moments, gradients.

    Args:
        numel: Number of elements.
        dtype: Type of the gradients; fp32 if they are sums of several micro-batches.
        device: The card.

    Attributes:
        state: fp32 weights and both moments, made when they first come from the host; None while the host's are the newest.
        gradients: Shape (elements,).
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.state: tuple[Tensor, Tensor, Tensor] | None = None
        self.gradients = torch.zeros(numel, dtype=dtype, device=device)
        self._room: tuple[Tensor, Tensor, Tensor] | None = None

    def fetch(self, host: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the state, which comes from a partition's on the host if that is newer."""
        if self.state is None:
            numel, device = len(self.gradients), self.gradients.device
            self._room = self._room or tuple(torch.empty(numel, device=device) for _ in range(3))  # type: ignore[assignment]
            for room, source in zip(self._room, host, strict=True):  # type: ignore[arg-type]
                room.copy_(source.narrow(0, 0, numel))
            self.state = self._room
        assert self.state is not None
        return self.state

    def put_back(self, host: tuple[Tensor, Tensor, Tensor]) -> None:
        """Copy the state to that of the partition on the host, whose is the newest from then on."""
        if self.state is not None:
            for source, target in zip(self.state, host, strict=True):
                target.narrow(0, 0, len(source)).copy_(source)
            self.state = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CopiedRun:
    """A run of trained weights outside of streamed layers, of which the card has a copy for as long as the run lasts.

    Args:
        host: Their part of the flat weights in host memory.
        card: The same on the card.
        weights: The weights.
        places: First element of each.
    """

    host: Tensor
    card: Tensor
    weights: tuple[nn.Parameter, ...]
    places: tuple[int, ...]

    def use_host(self) -> None:
        """Let the weights be those in host memory."""
        self._use(self.host)

    def use_card(self) -> None:
        """Fill the card's copy, and let the weights be those there."""
        self.card.copy_(self.host, non_blocking=True)
        self._use(self.card)

    def _use(self, memory: Tensor) -> None:
        for weight, place in zip(self.weights, self.places, strict=True):
            weight.data = memory.narrow(0, place, weight.numel()).view(weight.shape)


def _joined(bounds: list[tuple[int, Any]]) -> list[tuple[int, int, Any]]:
    """Return runs of neighbours of one kind, as first and last place and kind, from the place and the kind of each."""
    runs: list[tuple[int, int, Any]] = []
    for (start, kind), (end, _) in itertools.pairwise(bounds):
        if runs and runs[-1][2] == kind:
            runs[-1] = (runs[-1][0], end, kind)
        else:
            runs.append((start, end, kind))
    return runs
