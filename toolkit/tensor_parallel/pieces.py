"""Collectives along the sequence that run beside products; the sequence is the dimension before the features.

s: tokens of one rank's piece of the sequence, S: all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from toolkit.groups.collectives import Pending, equal_pieces

SEQUENCE_DIM = -2

_ops: Any = torch.ops._c10d_functional


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathering:
    """Pieces that may still be on their way: only `wait` gives a tensor that may be read."""

    pending: Pending
    num_ranks: int

    def wait(self) -> torch.Tensor:
        """Gives the whole sequence."""
        stacked = self.pending.wait()
        return stacked if stacked.dim() == 2 else torch.cat(stacked.chunk(self.num_ranks), SEQUENCE_DIM)


def start_gather(piece: torch.Tensor, *, tp_group: dist.ProcessGroup) -> Gathering:
    """Starts to join the ranks' pieces. Shapes (…, s, features) to (…, S, features)."""
    size = tp_group.size()
    stacked = _ops.all_gather_into_tensor(piece.contiguous(), size, tp_group.group_name)
    return Gathering(pending=Pending(tensor=stacked), num_ranks=size)


def start_reduce_scatter(whole: torch.Tensor, *, tp_group: dist.ProcessGroup) -> Pending:
    """Starts to give each rank its piece of the sum over the ranks. Shapes (…, S, features) to (…, s, features)."""
    size = tp_group.size()
    stacked = whole if whole.dim() == 2 else torch.cat(equal_pieces(whole, size, dim=SEQUENCE_DIM))
    return Pending(tensor=_ops.reduce_scatter_tensor(stacked.contiguous(), "sum", size, tp_group.group_name))
