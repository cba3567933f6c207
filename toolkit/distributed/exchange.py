"""A differentiable all-to-all: each rank's rows for the others, whose gradients come back the other way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Function

from toolkit.distributed.collectives import all_to_all


def exchange_rows(
    rows: torch.Tensor, *, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Return the rows, along the first dimension, that the ranks have for this one. Shapes (S, …) to (T, …).

    Args:
        rows: Rows for the first rank, then those for the second, and so on.
        sent: How many of them are for each rank; S together.
        received: How many each rank has for this one; T together.
        group: Ranks that exchange rows.

    Collectives:
        forward: all-to-all; backward: all-to-all, the other way.
    """
    return _Exchange.apply(rows, sent, received, group)  # type: ignore[no-any-return, no-untyped-call]


def exchange_pieces(pieces: torch.Tensor, *, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the pieces that the ranks have for this one, in their order: `exchange_rows` with one row for each rank.

    Args:
        pieces: One piece for each rank of the group. Shape (N, …).
        group: Ranks that exchange pieces.
    """
    ones = [1] * group.size()
    return exchange_rows(pieces, sent=ones, received=ones, group=group)


class _Exchange(Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return all_to_all(rows, sent=sent, received=received, group=group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        # The function itself, so that second derivatives are right too.
        return _Exchange.apply(grads[0], ctx.received, ctx.sent, ctx.group), None, None, None  # type: ignore[no-untyped-call]
