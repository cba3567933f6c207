"""A group whose other ranks do not exist, alone and beside groups that are real."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_distributed

from toolkit.distributed.collectives import all_gather, all_reduce, reduce_scatter, start_all_reduce
from toolkit.distributed.fake import fake_group
from toolkit.distributed.process_groups import split_group


def test_it_has_the_size_the_ranks_and_the_parts_of_a_real_one() -> None:
    with fake_group(8, rank=5) as group:
        part = split_group(group, 4)
        assert (group.size(), group.rank(), part.size(), part.rank()) == (8, 5, 2, 1)
        assert split_group(group, 1) is group
        with pytest.raises(ValueError, match="num_parts=3 does not divide a group of 8 ranks"):
            split_group(group, 3)
        x = torch.arange(16.0).reshape(8, 2)
        assert torch.equal(all_reduce(x, group=group), x)
        assert start_all_reduce(x, group=part).wait().data_ptr() == x.data_ptr()
        assert all_gather(x, dim=1, group=group).shape == (8, 16)
        assert reduce_scatter(x, dim=0, group=part).shape == (4, 2)
    assert not dist.is_initialized()


def test_it_ends_with_its_block_and_knows_its_ranks() -> None:
    with fake_group(2) as group:
        part = split_group(group, 2)
    for ended in (group, part):
        with pytest.raises((RuntimeError, ValueError)):
            all_reduce(torch.ones(2), group=ended)
    with pytest.raises(ValueError, match="rank 2 is not in a group of 2 ranks"), fake_group(2, rank=2):
        pass


def beside(rank: int) -> dict[str, Any]:
    world = dist.group.WORLD
    assert world is not None
    real = split_group(world, 2)
    with fake_group(4, rank=3) as group, fake_group(4) as other:
        fake = all_reduce(torch.full((2,), float(rank)), group=split_group(group, 2)).tolist()
        gathered = all_gather(torch.ones(1), dim=0, group=other).shape[0]
        inside = all_reduce(torch.ones(2), group=world).tolist()
    after = all_reduce(torch.ones(1), group=real).tolist()
    fresh = dist.new_group([0, 1])
    return {"fake": fake, "gathered": gathered, "inside": inside, "after": after, "fresh": fresh.size()}


@pytest.mark.gloo
def test_beside_real_groups_each_keeps_to_itself() -> None:
    for rank, found in enumerate(run_distributed(beside, 2)):
        assert found == {"fake": [rank, rank], "gathered": 4, "inside": [2.0, 2.0], "after": [1.0], "fresh": 2}
