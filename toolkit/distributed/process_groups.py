"""Process groups of a grid's axes, subgroups of a group, and others: the only `new_group` calls.

Each has the timeout of the group of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from toolkit.distributed.fake import FakeGroup
from toolkit.distributed.thread_ranks import ThreadGroup
from toolkit.topology.grid import Grid

_Groups: TypeAlias = tuple[tuple[int, ...], ...]
_world: dist.ProcessGroup | None = None
_of_world: dict[_Groups, dict[tuple[int, ...], dist.ProcessGroup]] = {}


def join_group(grid: Grid, rank: int, *kinds: str) -> dist.ProcessGroup:
    """Create every group of a kind, as all ranks of the world must, and return the one with `rank`.

    Groups of the same ranks are created once, as each has a communicator, which takes memory on a GPU.

    Args:
        grid: Grid of all ranks, which all call this with the same kinds in the same order.
        rank: This process's global rank.
        kinds: Kinds as in `Grid.groups`: `"tp"`, `"dp"`, `"pp"`, or several.
    """
    groups = grid.groups(*kinds)
    if len(groups) == 1:
        world = dist.group.WORLD
        assert world is not None, "init_process_group has not run, or its groups were destroyed"
        return world
    made = _made()
    if groups not in made:
        made[groups] = {ranks: dist.new_group(list(ranks), timeout=world_timeout()) for ranks in groups}
    return made[groups][grid.group_of(rank, *kinds)]


def split_group(group: dist.ProcessGroup, num_parts: int) -> dist.ProcessGroup:
    """Split a group into equal runs of neighbours, and return the one with this process.

    Only the ranks of `group` call this.

    Raises:
        ValueError: If `num_parts` does not divide the group.
    """
    if isinstance(group, FakeGroup | ThreadGroup):
        return group.part(num_parts)
    ranks = dist.get_process_group_ranks(group)
    length, left_over = divmod(len(ranks), num_parts)
    if left_over:
        raise ValueError(f"num_parts={num_parts} does not divide a group of {len(ranks)} ranks")
    if num_parts == 1:
        return group
    start = group.rank() // length * length
    own: dist.ProcessGroup = dist.new_group(
        ranks[start : start + length], timeout=world_timeout(), use_local_synchronization=True
    )
    return own


# Multiprocessors that a message of NCCL may hold while it waits for the other end beside matrix products: 3 % of a step less
# than with the 16 that NCCL takes over NVLink (two H200s, 1F1B), and still 30 times as fast as a pass.
MESSAGE_CTAS = 2


def join_each(groups: Sequence[Sequence[int]], *, rank: int, messages: int = 0) -> list[dist.ProcessGroup | None]:
    """Create each of several groups of global ranks; return those with `rank`, and None for the others.

    All ranks call this, and ranks that share a group must have it at the same index of their lists.

    Args:
        groups: Global ranks of each group.
        rank: This process's global rank.
        messages: How many of the groups, the first ones, are for messages between two ranks, which wait beside computation.

    Source:
        torch distributed/distributed_c10d.py _hash_ranks_to_str: a group that only its own ranks create is named by how
        many groups the process has, so a rank creates a group of itself alone for each group that it is not in.
    """
    made: list[dist.ProcessGroup | None] = []
    for index, ranks in enumerate(groups):
        own = sorted(ranks) if rank in ranks else [rank]
        options = _message_options() if index < messages else None
        group = dist.new_group(own, timeout=world_timeout(), use_local_synchronization=True, pg_options=options)
        made.append(group if rank in ranks else None)
    return made


def _message_options() -> Any:
    if dist.get_backend() != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = MESSAGE_CTAS
    options._timeout = world_timeout() or options._timeout
    return options


def _made() -> dict[_Groups, dict[tuple[int, ...], dist.ProcessGroup]]:
    """Return the groups that `join_group` has created in the current world."""
    global _world
    if _world is not dist.group.WORLD:
        _world = dist.group.WORLD
        _of_world.clear()
    return _of_world


def forget_groups() -> None:
    """Forget the groups of a world that has been destroyed."""
    _made()


def world_timeout() -> timedelta | None:
    """Return the timeout of the group of all ranks; None in a fake world.

    Source:
        torch distributed/distributed_c10d.py _get_default_timeout: by default it is the backend's, 10 minutes for NCCL.
    """
    world = dist.group.WORLD
    assert world is not None, "init_process_group has not run, or its groups were destroyed"
    backend: Any = world._get_backend(torch.device("cuda" if dist.get_backend() == "nccl" else "cpu"))
    return getattr(backend.options, "_timeout", None)
