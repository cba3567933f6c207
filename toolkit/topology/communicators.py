"""The groups in which a rank of a run communicates: joined in `toolkit.distributed`, counted by the memory estimate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from toolkit.topology.grid import Grid

Message = Literal["activation", "gradient"]
Route = tuple[int, int, Message]

# Messages that may be in flight when a rank continues. The host enqueues work faster than GPUs run it: tensors to send
# would pile up if the compute stream did not wait. No schedule without virtual stages deadlocks by that wait, as
# `simulate` shows; with virtual stages some would, so they wait only at the end of a step.
MAX_SENDS_IN_FLIGHT = 2


def axis_kinds(grid: Grid) -> tuple[str, ...]:
    """Return the kinds of groups along axes, as in `Grid.groups`: model-parallel ones only where there are such ranks."""
    tensor = ("tp",) if grid.tp > 1 else ()
    context = ("cp",) if grid.cp > 1 else ()
    return ("world", "dp", *context, *tensor, *(("model", "dp-pp") if grid.pp > 1 else ()))


def routes(num_stages: int, *, wraps: bool) -> list[Route]:
    """Return (sender, receiver, message) of each channel between stage ranks, in the same order on every rank.

    Args:
        num_stages: Pipeline ranks.
        wraps: Whether the last sends activations to the first, as virtual stages do.
    """
    pairs = [(stage, stage + 1) for stage in range(num_stages - 1)]
    if wraps:
        pairs.append((num_stages - 1, 0))
    forward: list[Route] = [(first, second, "activation") for first, second in pairs]
    return [*forward, *((second, first, "gradient") for first, second in pairs)]


def ends(grid: Grid, rank: int) -> list[int]:
    """Return the first and the last stage of all pipelines for a rank's position in the tensor group."""
    own = grid.coordinate(rank)
    return [grid.rank(replace(own, pp=pp, dp=dp)) for pp in sorted({0, grid.pp - 1}) for dp in range(grid.dp)]


def communicators(grid: Grid, rank: int, *, wraps: bool, tied: bool) -> Iterator[tuple[int, ...]]:
    """Yield the ranks of each group of several in which a rank communicates; groups of the same ranks along axes are one.

    Args:
        grid: Grid of all ranks.
        rank: Global rank.
        wraps: As in `routes`.
        tied: Whether the first and the last stage share a weight, whose gradient they sum.
    """
    yield from {group for kind in axis_kinds(grid) if len(group := grid.group_of(rank, kind)) > 1}
    if grid.pp == 1:
        return
    stages = grid.group_of(rank, "pp")
    pairs = [(stages[source], stages[target]) for source, target, _ in routes(grid.pp, wraps=wraps)]
    yield from (pair for pair in pairs if rank in pair)
    if tied and rank in (both := ends(grid, rank)):
        yield tuple(both)
