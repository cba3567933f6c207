"""Which slices of a dense parameter each rank of a tensor group owns, and slicing and gathering tensors accordingly."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn import functional

from toolkit.distributed.collectives import all_gather


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A run of equal units that are never split: heads, or single features.

    Args:
        num_units: Number of units in the run.
        unit_size: Length of each unit.
    """

    num_units: int
    unit_size: int = 1

    @property
    def length(self) -> int:
        """Length of the run."""
        return self.num_units * self.unit_size

    def owners(self, num_ranks: int) -> int:
        """Return the number of ranks that share one unit: 1 if there are enough units.

        Raises:
            ValueError: If neither number divides the other.
        """
        fewer, more = sorted((self.num_units, num_ranks))
        if more % fewer:
            raise ValueError(f"{self.num_units} units over {num_ranks} ranks: neither number divides the other")
        return max(1, num_ranks // self.num_units)

    def range_of(self, rank: int, num_ranks: int) -> range:
        """Return the range of the run that `rank` owns, counted from its start.

        >>> Part(num_units=8, unit_size=2).range_of(1, 4)
        range(4, 8)
        >>> [Part(num_units=2, unit_size=10).range_of(rank, 4) for rank in range(4)]
        [range(0, 10), range(0, 10), range(10, 20), range(10, 20)]
        """
        owners = self.owners(num_ranks)
        own = max(1, self.num_units // num_ranks) * self.unit_size
        start = rank // owners * own
        return range(start, start + own)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A dimension as consecutive equal blocks, each of the same consecutive parts.

    Blocks are distributed first; if there are fewer than ranks, several ranks share a block and divide its parts.
    Each unit of a part with fewer units than ranks is replicated on several ranks.

    Keys and values of grouped-query attention, fused after the queries (Phi-3), 4 query and 2 key heads of size 2:

    >>> fused = Layout(parts=(Part(num_units=4, unit_size=2), Part(num_units=2, unit_size=2), Part(num_units=2, unit_size=2)))
    >>> fused.ranges(1, 2)
    (range(4, 8), range(10, 12), range(14, 16))

    The same heads interleaved, a block for each key head (Falcon):

    >>> interleaved = Layout(parts=(Part(num_units=2, unit_size=2), Part(num_units=1, unit_size=2), Part(num_units=1, unit_size=2)), num_blocks=2)
    >>> interleaved.ranges(1, 2)
    (range(8, 16),)
    >>> interleaved.ranges(1, 4), interleaved.owners(4)
    ((range(2, 4), range(4, 6), range(6, 8)), (1, 2, 2))

    Args:
        parts: Parts of one block.
        num_blocks: Number of blocks in the dimension.
    """

    parts: tuple[Part, ...]
    num_blocks: int = 1

    @property
    def length(self) -> int:
        """Length of the dense dimension."""
        return self.num_blocks * self._block_length

    @property
    def _block_length(self) -> int:
        return sum(part.length for part in self.parts)

    def _is_whole_blocks(self, sharing: int) -> bool:
        """Return whether a rank owns whole blocks, which are one range, given how many ranks share a block."""
        return sharing == 1 and self.num_blocks > 1

    def owners(self, num_ranks: int) -> tuple[int, ...]:
        """Return, for each range of `ranges`, the number of ranks that have the same range.

        Raises:
            ValueError: If units and blocks cannot be divided evenly over the ranks.
        """
        sharing = Part(num_units=self.num_blocks).owners(num_ranks)
        if self._is_whole_blocks(sharing):
            return (1,)
        return tuple(part.owners(sharing) for part in self.parts)

    def ranges(self, rank: int, num_ranks: int) -> tuple[range, ...]:
        """Return the ranges of the dense dimension that `rank` owns, in the order of its shard."""
        blocks = Part(num_units=self.num_blocks, unit_size=self._block_length)
        sharing = blocks.owners(num_ranks)
        own = blocks.range_of(rank, num_ranks)
        if self._is_whole_blocks(sharing):
            return (own,)
        ranges, start = [], own.start
        for part in self.parts:
            inside = part.range_of(rank % sharing, sharing)
            ranges.append(range(start + inside.start, start + inside.stop))
            start += part.length
        return tuple(ranges)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """How one parameter is sharded.

    Args:
        dim: Dimension that is sharded.
        layout: Layout of that dimension; longer than the dense one if shards are padded with zeros.
        dense_length: Length of the dense dimension.
    """

    dim: int
    layout: Layout
    dense_length: int

    def take(self, dense: torch.Tensor, *, rank: int, num_ranks: int) -> torch.Tensor:
        """Copy a rank's shard out of a dense tensor."""
        padding = self.layout.length - self.dense_length
        if padding:
            dense = functional.pad(dense, (0, 0) * (dense.dim() - 1 - self.dim) + (0, padding))
        pieces = [dense.narrow(self.dim, own.start, len(own)) for own in self.layout.ranges(rank, num_ranks)]
        return torch.cat(pieces, self.dim)

    def gather(self, local: torch.Tensor, *, tp_group: dist.ProcessGroup) -> torch.Tensor:
        """Return the dense tensor of which `local` is this rank's shard.

        Collectives:
            One all-gather, the size of the dense tensor times the number of ranks that have the same shard.
        """
        shards = all_gather(local.unsqueeze(0), dim=0, group=tp_group)
        shape = list(local.shape)
        shape[self.dim] = self.layout.length
        dense = local.new_empty(shape)
        for rank, shard in enumerate(shards):
            start = 0
            for own in self.layout.ranges(rank, len(shards)):
                dense.narrow(self.dim, own.start, len(own)).copy_(shard.narrow(self.dim, start, len(own)))
                start += len(own)
        return dense.narrow(self.dim, 0, self.dense_length)
