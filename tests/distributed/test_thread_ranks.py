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


def test_a_part_that_is_made_after_another_rank_failed_fails_too() -> None:
    has_failed = threading.Event()

    def fails(group: dist.ProcessGroup) -> None:
        whole, part = group, split_group(group, 2)
        if whole.rank() == 0:
            try:
                raise KeyError("of rank 0")
            finally:
                whole.abort()  # type: ignore[attr-defined]
                has_failed.set()
        has_failed.wait()
        all_reduce(torch.ones(1), group=split_group(part, 1) if whole.rank() == 1 else split_group(whole, 1))

    with pytest.raises(KeyError, match="of rank 0"):
        run_threads(fails, 4, seconds=20)


def test_a_rank_that_never_joins_is_not_waited_for_ever() -> None:
    with pytest.raises(TimeoutError, match=r"did not join a collective of 2 threads within 0\.05 s"):
        run_threads(lambda group: group.rank() or all_reduce(torch.ones(1), group=group), 2, seconds=0.05)


@pytest.mark.parametrize(("op", "wanted"), [("AVG", 2.5), ("MIN", 2.0), ("MAX", 3.0), ("PRODUCT", 6.0), ("SUM", 5.0)])
def test_operations_reduce_as_they_say(op: str, wanted: float) -> None:
    def reduced(group: dist.ProcessGroup) -> tuple[float, float]:
        x, part = torch.full((2,), 2.0 + group.rank()), torch.zeros(1)
        options = dist.AllreduceOptions()
        options.reduceOp = getattr(dist.ReduceOp, op)
        scatter = dist.ReduceScatterOptions()
        scatter.reduceOp = getattr(dist.ReduceOp, op)
        group._reduce_scatter_base(part, x, scatter)
        group.allreduce([x], options)
        return x[0].item(), part.item()

    assert run_threads(reduced, 2) == [(wanted, wanted)] * 2


def test_an_operation_that_threads_lack_is_refused() -> None:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.BAND  # type: ignore[assignment]
    with pytest.raises(NotImplementedError, match="SUM, AVG, MAX, MIN, PRODUCT alone"):
        run_threads(lambda group: group.allreduce([torch.ones(1)], options), 2)
