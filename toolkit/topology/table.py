"""The rank table that `toolkit topology` shows, as plain rows and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from toolkit.topology.grid import Coordinate
from toolkit.topology.placement import Placement

HEADER = ("rank", "node", "local", "pp", "dp", "tp", "tp group", "dp group", "pp group")
# Ranks in no even steps that a sentence names before it counts the rest.
_NAMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One rank: its node and local rank, its coordinate, and the ranks of each of its groups."""

    rank: int
    node: int
    local_rank: int
    coordinate: Coordinate
    tp_group: tuple[int, ...]
    dp_group: tuple[int, ...]
    pp_group: tuple[int, ...]

    def cells(self) -> tuple[str, ...]:
        """Return the row as text, in the order of `HEADER`."""
        place = self.coordinate
        numbers = (self.rank, self.node, self.local_rank, place.pp, place.dp, place.tp)
        return (*map(str, numbers), *map(format_ranks, (self.tp_group, self.dp_group, self.pp_group)))


def rows(placement: Placement) -> list[Row]:
    """Return one row per rank, in rank order; the ranks of a group share one tuple.

    >>> from toolkit.topology import Grid, place
    >>> for row in (HEADER, *(row.cells() for row in rows(place(Grid(pp=2, dp=2, tp=2), num_nodes=2, gpus_per_node=4)))):
    ...     print(*(cell.rjust(8) for cell in row))
        rank     node    local       pp       dp       tp tp group dp group pp group
           0        0        0        0        0        0      0-1      0,2      0,4
           1        0        1        0        0        1      0-1      1,3      1,5
           2        0        2        0        1        0      2-3      0,2      2,6
           3        0        3        0        1        1      2-3      1,3      3,7
           4        1        0        1        0        0      4-5      4,6      0,4
           5        1        1        1        0        1      4-5      5,7      1,5
           6        1        2        1        1        0      6-7      4,6      2,6
           7        1        3        1        1        1      6-7      5,7      3,7
    """
    grid = placement.grid
    tp_group, dp_group, pp_group = (
        {rank: group for group in grid.groups(axis) for rank in group} for axis in ("tp", "dp", "pp")
    )
    return [
        Row(
            rank=rank,
            node=placement.node(rank),
            local_rank=placement.local_rank(rank),
            coordinate=grid.coordinate(rank),
            tp_group=tp_group[rank],
            dp_group=dp_group[rank],
            pp_group=pp_group[rank],
        )
        for rank in range(grid.world_size)
    ]


def format_ranks(ranks: Sequence[int]) -> str:
    """Return evenly spaced ranks as short text.

    >>> format_ranks((3,)), format_ranks((0, 1, 2, 3)), format_ranks((0, 4, 8))
    ('3', '0-3', '0,4,8')
    >>> format_ranks(range(0, 128, 4))
    '0,4..124 (32)'
    """
    if len(ranks) > 1 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) <= 4:
        return ",".join(map(str, ranks))
    return f"{ranks[0]},{ranks[1]}..{ranks[-1]} ({len(ranks)})"


def name_ranks(ranks: Sequence[int]) -> str:
    """Return ranks in rising order as a sentence names them; the empty text for none.

    >>> name_ranks([1]), name_ranks([0, 2]), name_ranks(range(8)), name_ranks(range(0, 128, 4))
    ('rank 1', 'ranks 0, 2', 'ranks 0-7', 'ranks 0,4..124 (32)')
    >>> name_ranks([0, 1, 2, 3, 5, 8, 13, 21, 34, 55])
    'ranks 0, 1, 2, 3, 5, 8, 13, 21 and 2 more'
    """
    if len(ranks) < 2:
        return f"rank {ranks[0]}" if ranks else ""
    steps = {after - before for before, after in pairwise(ranks)}
    if len(steps) == 1 and len(ranks) > (2 if steps == {1} else 4):
        return f"ranks {format_ranks(ranks)}"
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"ranks {', '.join(map(str, ranks[:_NAMED]))}{more}"


def to_dict(placement: Placement) -> dict[str, Any]:
    """Return the placement as the object that `toolkit topology --json` prints.

    Returns:
        `grid` (sizes), `world_size`, `num_nodes`, `gpus_per_node`, `ranks` (one object per rank), and `groups`: for each
        kind its `size`, `num_groups`, `inside_node`, `max_nodes` and `ranks`, one list per group.
    """
    grid = placement.grid
    return {
        "grid": grid.as_dict(),
        "world_size": grid.world_size,
        "num_nodes": placement.num_nodes,
        "gpus_per_node": placement.gpus_per_node,
        "ranks": [
            {
                "rank": rank,
                "node": placement.node(rank),
                "local_rank": placement.local_rank(rank),
                "coordinate": grid.coordinate(rank).as_dict(),
            }
            for rank in range(grid.world_size)
        ],
        "groups": {kind: _kind(placement, kind) for kind in grid.kinds},
    }


def _kind(placement: Placement, kind: str) -> dict[str, Any]:
    described = placement.kind(kind)
    return {
        "size": described.size,
        "num_groups": described.num_groups,
        "inside_node": described.inside_node,
        "max_nodes": described.max_nodes,
        "ranks": [list(group) for group in placement.grid.groups(kind)],
    }
