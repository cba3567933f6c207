"""Threads as ranks give the results that collectives of processes give."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_distributed

from toolkit.distributed.collectives import all_gather, all_reduce, broadcast, reduce_scatter, start_all_reduce
from toolkit.distributed.process_groups import split_group
from toolkit.distributed.thread_ranks import run_threads


def every_collective(group: dist.ProcessGroup) -> list[Any]:
    x = torch.arange(8.0).view(2, 4) + 10 * group.rank()
    pair = split_group(group, 2)
    made = (
        all_reduce(x, group=group),
        start_all_reduce(x.clone(), group=group).wait(),
        all_reduce(x, group=group, op="max"),
        all_gather(x, dim=1, group=group),
        reduce_scatter(x, dim=1, group=group),
        broadcast(x, source=2, group=group),
        all_reduce(x, group=pair),
    )
    return [(group.rank(), pair.rank(), pair.size()), *(tensor.tolist() for tensor in made)]


def on_processes(rank: int) -> list[Any]:
    world = dist.group.WORLD
    assert world is not None
    return every_collective(world)


@pytest.mark.gloo
def test_threads_are_ranks_as_processes_are() -> None:
    assert run_threads(every_collective, 4) == run_distributed(on_processes, 4)


def test_gradients_cross_threads() -> None:
    from toolkit.tensor_parallel.autograd import copy_to_region, reduce_from_region

    def gradient(group: dist.ProcessGroup) -> tuple[float, float]:
        x = torch.ones(3, requires_grad=True)
        y = reduce_from_region(copy_to_region(x, tp_group=group) * (group.rank() + 1), tp_group=group)
        y.sum().backward()
        assert x.grad is not None
        return y[0].item(), x.grad[0].item()

    assert run_threads(gradient, 2) == [(3.0, 3.0)] * 2


def test_the_error_of_the_rank_that_fails_is_raised_and_nobody_waits() -> None:
    def fails(group: dist.ProcessGroup) -> None:
        if group.rank() == 1:
            raise KeyError("of rank 1")
        all_reduce(torch.ones(1), group=group)

    before = threading.active_count()
    with pytest.raises(KeyError, match="of rank 1"):
        run_threads(fails, 2)
    assert threading.active_count() == before


def test_a_group_is_split_into_equal_parts_alone() -> None:
    with pytest.raises(ValueError, match="num_parts=3 does not divide a group of 4 ranks"):
        run_threads(lambda group: split_group(group, 3), 4)
