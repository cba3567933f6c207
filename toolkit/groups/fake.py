"""A world of any size in one process, for traces and tests: its collectives give shapes, not values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from toolkit.topology.grid import Grid


@contextmanager
def fake_world(grid: Grid, *, rank: int = 0) -> Iterator[None]:
    """Makes this process rank `rank` of a grid whose other ranks do not exist.

    Inside, `join_group` and `split_group` give groups of the real sizes. A reduction leaves its input as it is, and
    what is gathered from other ranks is undefined.

    Args:
        grid: The ranks.
        rank: Which of them to be.

    Raises:
        ValueError: Where the process has joined a group already, or `rank` is not in the grid.

    Source:
        torch csrc/distributed/c10d/FakeProcessGroup.hpp.
    """
    grid.coordinate(rank)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=grid.world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
