"""Which slice of a row's sequence a rank keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist

from toolkit.errors import RunError


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSlice:
    """One of equal slices of a row, in the order of the ranks.

    Args:
        rank: Which slice.
        size: Number of slices.
    """

    rank: int
    size: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Self:
        """Return the slice of this rank in a group that shares rows."""
        return cls(rank=group.rank(), size=group.size())

    def take(self, whole: torch.Tensor, *, dim: int) -> torch.Tensor:
        """Return this rank's slice along a dimension, as a view.

        Raises:
            RunError: CONTEXT_BATCH if the slices would not be equal.
        """
        length, left_over = divmod(whole.shape[dim], self.size)
        if left_over:
            raise RunError.of(
                code="CONTEXT_BATCH",
                key="parallel.context",
                message=f"a batch of rows of {whole.shape[dim]} tokens with context={self.size}: each rank keeps an equal slice of every row",
                fix=f"Pad rows to a multiple of {self.size} tokens with labels of -100, or take batches from `run.loader`",
            )
        return whole.narrow(dim, self.rank * length, length)
