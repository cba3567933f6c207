"""Process groups of a grid's axes, groups within a group, and any others: the only `new_group` calls.

Each waits as long as the group of all ranks does.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from toolkit.distributed.fake import FakeGroup
from toolkit.topology.grid import Grid

_Groups: TypeAlias = tuple[tuple[int, ...], ...]
_world: dist.ProcessGroup | None = None
_of_world: dict[_Groups, dict[tuple[int, ...], dist.ProcessGroup]] = {}


def join_group(grid: Grid, rank: int, *kinds: str) -> dist.ProcessGroup:
    """Makes every group of a kind, as all ranks of the world must, and gives the one that holds `rank`.

    Groups of the same ranks are made once: each has a communicator, which on a card takes memory of its own.

    Args:
        grid: All ranks, which all call this with the same kinds in the same order.
        rank: This process's global rank.
        kinds: As `Grid.groups` takes them: `"tp"`, `"dp"`, `"pp"`, or several.
    """
    groups = grid.groups(*kinds)
    if len(groups) == 1:
        world = dist.group.WORLD
        assert world is not None, "init_process_group has run"
        return world
    made = _made()
    if groups not in made:
        made[groups] = {ranks: dist.new_group(list(ranks), timeout=_timeout()) for ranks in groups}
    return made[groups][grid.group_of(rank, *kinds)]


def split_group(group: dist.ProcessGroup, num_parts: int) -> dist.ProcessGroup:
    """Cuts a group into runs of neighbours of equal size, and gives the run that holds this process.

    Only the ranks of `group` call this.

    Raises:
        ValueError: If `num_parts` does not divide the group.
    """
    if isinstance(group, FakeGroup):
        return group.part(num_parts)
    ranks = dist.get_process_group_ranks(group)
    length, left_over = divmod(len(ranks), num_parts)
    if left_over:
        raise ValueError(f"num_parts={num_parts} does not divide a group of {len(ranks)} ranks")
    if num_parts == 1:
        return group
    start = group.rank() // length * length
    own: dist.ProcessGroup = dist.new_group(
        ranks[start : start + length], timeout=_timeout(), use_local_synchronization=True
    )
    return own


def join_each(groups: Sequence[Sequence[int]], *, rank: int) -> list[dist.ProcessGroup | None]:
    """Makes each of several groups of global ranks; gives those that hold `rank`, and None for the others.

    All ranks call this, those that share a group with lists that have it at the same place.

    Source:
        torch distributed/distributed_c10d.py _hash_ranks_to_str: a group that its ranks make by themselves is named by how
        many the process has, so a rank makes one of itself alone for each group that it is not in.
    """
    made: list[dist.ProcessGroup | None] = []
    for ranks in groups:
        own = sorted(ranks) if rank in ranks else [rank]
        group = dist.new_group(own, timeout=_timeout(), use_local_synchronization=True)
        made.append(group if rank in ranks else None)
    return made


def _made() -> dict[_Groups, dict[tuple[int, ...], dist.ProcessGroup]]:
    """Return what `join_group` has made in the world that there is now."""
    global _world
    if _world is not dist.group.WORLD:
        _world = dist.group.WORLD
        _of_world.clear()
    return _of_world


def forget_groups() -> None:
    """Lets go of the groups of a world that has been left."""
    _made()


def _timeout() -> timedelta | None:
    """Return the timeout of the group of all ranks; None in a fake world.

    Source:
        torch distributed/distributed_c10d.py _get_default_timeout: left out, it is the backend's, of NCCL 10 minutes.
    """
    world = dist.group.WORLD
    assert world is not None, "init_process_group has run"
    backend: Any = world._get_backend(torch.device("cuda" if dist.get_backend() == "nccl" else "cpu"))
    return getattr(backend.options, "_timeout", None)
