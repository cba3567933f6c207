"""Process groups wait as long as that of all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from toolkit.distributed.collectives import all_gather, all_reduce, reduce_scatter, start_all_reduce
from toolkit.distributed.fake import fake_world
from toolkit.distributed.process_groups import join_group, split_group
from toolkit.topology.grid import Grid


def test_a_fake_world_has_the_groups_and_shapes_of_the_real_one() -> None:
    with fake_world(Grid(pp=2, dp=16, tp=8), rank=77), FakeTensorMode():
        tp_group = join_group(Grid(pp=2, dp=16, tp=8), 77, "tp")
        assert dist.get_process_group_ranks(tp_group) == list(range(72, 80))
        assert tp_group.rank() == 5
        assert dist.get_process_group_ranks(split_group(tp_group, 4)) == [76, 77]
        x = torch.ones(16, 3)
        assert all_reduce(x, group=tp_group).shape == (16, 3)
        assert start_all_reduce(x, group=tp_group).wait().shape == (16, 3)
        assert all_gather(x, dim=1, group=tp_group).shape == (16, 24)
        assert reduce_scatter(x, dim=0, group=tp_group).shape == (2, 3)
    assert not dist.is_initialized()
