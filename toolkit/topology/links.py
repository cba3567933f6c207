"""Stage boundaries of a pipeline, and which of their messages cross the network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from toolkit.topology.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """The links from the ranks of one pipeline coordinate to those of the next.

    Args:
        start: Coordinate of the earlier stage.
        stop: Coordinate of the later one; 0 after the last rank, if virtual stages wrap around.
        num_links: Number of pairs of ranks that exchange hidden states and their gradients.
        over_network: Number of those pairs that lie on two nodes.
    """

    start: int
    stop: int
    num_links: int
    over_network: int


def boundaries(placement: Placement, *, goes_round: bool = False) -> tuple[Boundary, ...]:
    """Return the boundaries of a pipeline, first to last; empty without a pipeline.

    Args:
        placement: Placement of ranks on nodes.
        goes_round: Whether the last rank sends to the first, as with virtual stages.
    """
    grid = placement.grid
    if grid.pp == 1:
        return ()
    crossing = [0] * grid.pp
    pipelines = grid.groups("pp")
    for ranks in pipelines:
        for start, rank in enumerate(ranks):
            crossing[start] += placement.node(rank) != placement.node(ranks[(start + 1) % grid.pp])
    return tuple(
        Boundary(start=start, stop=(start + 1) % grid.pp, num_links=len(pipelines), over_network=crossing[start])
        for start in range(grid.pp if goes_round else grid.pp - 1)
    )


def describe_boundaries(found: Sequence[Boundary]) -> tuple[str, ...]:
    """Return one line for each run of neighbouring boundaries that are alike.

    >>> from toolkit.topology import Grid, place
    >>> for line in describe_boundaries(boundaries(place(Grid(pp=4, tp=2), num_nodes=2, gpus_per_node=4))):
    ...     print(line)
    pp 0 → 1: 2 links, inside a node
    pp 1 → 2: 2 links, over the network
    pp 2 → 3: 2 links, inside a node
    """
    return tuple(_lines(found))


def _lines(found: Sequence[Boundary]) -> Iterator[str]:
    for (num_links, crossing), alike in groupby(found, key=lambda one: (one.num_links, one.over_network)):
        run = [f"{one.start} → {one.stop}" for one in alike]
        where = (
            "inside a node"
            if not crossing
            else "over the network"
            if crossing == num_links
            else f"{crossing} of them over the network"
        )
        each = "each " if len(run) > 1 else ""
        shown = ", ".join(run) if len(run) < 4 else f"{run[0]} … {run[-1]}"
        yield f"pp {shown}: {each}{num_links} link{'' if num_links == 1 else 's'}, {where}"
