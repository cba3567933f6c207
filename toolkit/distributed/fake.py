"""Fake ranks in one process, for traces and tests: their collectives have the right shapes, not values.

`fake_world` is a whole world of them, and needs a process that has joined no group. `fake_group` is one group, also usable
in a process with real groups, which it does not affect.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    FakeProcessGroup,
    _register_process_group,
    _unregister_process_group,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from toolkit.topology.grid import Grid


@contextmanager
def fake_world(grid: Grid, *, rank: int = 0) -> Iterator[None]:
    """Make this process rank `rank` of a grid whose other ranks are fake.

    Inside, `join_group` and `split_group` return groups of the real sizes. A reduction leaves its input unchanged, and
    what is gathered from other ranks is undefined.

    Args:
        grid: Grid of all ranks.
        rank: Rank of this process.

    Raises:
        ValueError: If the process has already joined a group, or `rank` is not in the grid.

    Source:
        torch csrc/distributed/c10d/FakeProcessGroup.hpp.
    """
    grid.coordinate(rank)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=grid.world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class FakeGroup(dist.ProcessGroup):
    """A group of which this process is the only real rank.

    Args:
        size: Number of ranks of the group.
        rank: Rank of this process in it.
    """

    def __init__(self, size: int, *, rank: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        custom = dist.ProcessGroup.BackendType.CUSTOM
        self._register_backend(torch.device("cpu"), custom, FakeProcessGroup._create_internal(rank, size))
        self._set_default_backend(custom)
        self._set_group_name(f"fake-{id(self):x}")  # type: ignore[arg-type]
        self._parts = ExitStack()

    def part(self, num_parts: int) -> dist.ProcessGroup:
        """Split the group into `num_parts` equal runs of neighbours, and return this rank's; it is closed with this group.

        Raises:
            ValueError: If `num_parts` does not divide the group.
        """
        length, left_over = divmod(self.size(), num_parts)
        if left_over:
            raise ValueError(f"num_parts={num_parts} does not divide a group of {self.size()} ranks")
        return self if num_parts == 1 else self._parts.enter_context(fake_group(length, rank=self.rank() % length))

    def close(self) -> None:
        """Close the parts."""
        self._parts.close()


@contextmanager
def fake_group(size: int, *, rank: int = 0) -> Iterator[FakeGroup]:
    """Yield a group of `size` ranks of which this process is rank `rank` and the others are fake.

    `toolkit.distributed.collectives` and `split_group` accept it like a real group; torch's own functions over a world do
    not.

    Args:
        size: Number of ranks of the group.
        rank: Rank of this process in it.

    Raises:
        ValueError: If `rank` is not in the group.

    Source:
        torch csrc/distributed/c10d/GroupRegistry.cpp: functional collectives find a group by its name.
    """
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} is not in a group of {size} ranks")
    group = FakeGroup(size, rank=rank)
    _register_process_group(group.group_name, group)
    try:
        yield group
    finally:
        group.close()
        _unregister_process_group(group.group_name)
