"""The part of a model that one rank of a pipeline owns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from toolkit.pipeline_schedule.partitioning import stage_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """Which decoder layers a rank owns, and whether it owns the modules before and after them.

    >>> str(StageSpec(chunks=(range(0, 4), range(8, 12)), num_layers=16))
    'embedding, layers 0-3, 8-11'
    >>> str(StageSpec(chunks=(range(15, 16),), num_layers=16))
    'layer 15, norm, head'

    Args:
        chunks: Layers of each of the rank's chunks, in the order of the forward pass; one chunk unless the rank has virtual
            stages.
        num_layers: Number of decoder layers of the whole model.

    Raises:
        TypeError: If a chunk is not a range.
        ValueError: If a chunk is empty, lies outside the model, or does not come after the one before.
    """

    chunks: tuple[range, ...]
    num_layers: int

    def __post_init__(self) -> None:
        for chunk in self.chunks:
            if not isinstance(chunk, range):
                raise TypeError(f"chunks={self.chunks!r}: each chunk is a range of layers, such as range(0, 2)")
            if not chunk or chunk.step != 1 or chunk.start < 0 or chunk.stop > self.num_layers:
                raise ValueError(f"{chunk} is not a contiguous range of the model's {self.num_layers} layers")
        if not self.chunks or any(later.start < earlier.stop for earlier, later in pairwise(self.chunks)):
            raise ValueError(f"chunks {self.chunks} must follow each other")

    @property
    def first(self) -> bool:
        """True if the rank owns the embedding and all other modules before the layers."""
        return self.is_first(0)

    @property
    def last(self) -> bool:
        """True if the rank owns the final norm, the head and all other modules after the layers."""
        return self.is_last(len(self.chunks) - 1)

    @property
    def ends(self) -> tuple[str, ...]:
        """Modules of the rank other than layers: `embedding` on the first stage, `norm` and `head` on the last."""
        return (*self._before, *self._after)

    @property
    def _before(self) -> tuple[str, ...]:
        return ("embedding",) if self.first else ()

    @property
    def _after(self) -> tuple[str, ...]:
        return ("norm", "head") if self.last else ()

    def is_first(self, chunk: int) -> bool:
        """Return whether a chunk is the pipeline's first stage."""
        return self.chunks[chunk].start == 0

    def is_last(self, chunk: int) -> bool:
        """Return whether a chunk is the pipeline's last stage."""
        return self.chunks[chunk].stop == self.num_layers

    def owns(self, layer: int) -> bool:
        """Return whether the rank owns a decoder layer."""
        return any(layer in chunk for chunk in self.chunks)

    def __str__(self) -> str:
        runs = [str(run.start) if len(run) == 1 else f"{run.start}-{run.stop - 1}" for run in self.chunks]
        layers = ("layer " if sum(map(len, self.chunks)) == 1 else "layers ") + ", ".join(runs)
        return ", ".join((*self._before, layers, *self._after))


def stage_of_rank(partition: Sequence[int], rank: int, *, pp: int) -> StageSpec:
    """Return the layers of a pipeline rank: those of every pp-th stage, starting with its first.

    >>> [str(stage_of_rank((2, 2, 2, 1), rank, pp=2)) for rank in range(2)]
    ['embedding, layers 0-1, 4-5', 'layers 2-3, 6, norm, head']

    Args:
        partition: Layers of each stage.
        rank: Pipeline rank.
        pp: Ranks of the pipeline.
    """
    return StageSpec(chunks=stage_layers(partition)[rank::pp], num_layers=sum(partition))
