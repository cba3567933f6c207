"""What each rank of a pipeline holds, and the line that says how a step fares."""

from __future__ import annotations

import doctest

import pytest
from plan_jobs import plan_of

import toolkit.planning.stage_parts
from toolkit.pipeline_schedule import bubble_fraction, build_schedule, stage_of_rank
from toolkit.planning.stage_parts import (
    bubble_of,
    describe_pipeline,
    describe_tensor,
    micro_batches_below,
)


def test_doctests() -> None:
    result = doctest.testmod(toolkit.planning.stage_parts)
    assert result.attempted >= 1
    assert result.failed == 0


@pytest.mark.parametrize(("pp", "virtual_stages"), [(2, 1), (2, 3), (4, 2)])
def test_every_layer_and_end_is_held_once_where_the_schedule_runs_it(pp: int, virtual_stages: int) -> None:
    name = "interleaved" if virtual_stages > 1 else "1f1b"
    schedule = build_schedule(name, pp=pp, micro_batches=pp, virtual_stages=virtual_stages)
    partition = [stage % 3 + 1 for stage in range(schedule.num_stages)]
    held = [stage_of_rank(partition, rank, pp=pp) for rank in range(pp)]
    starts = [sum(partition[:stage]) for stage in range(schedule.num_stages)]
    for stage, (start, count) in enumerate(zip(starts, partition, strict=True)):
        rank, chunk = schedule.place(stage)
        assert held[rank].chunks[chunk] == range(start, start + count)
    assert sorted(layer for part in held for run in part.chunks for layer in run) == list(range(sum(partition)))
    assert [part.ends for part in held] == [("embedding",), *[()] * (pp - 2), ("norm", "head")]


def test_a_plan_explains_its_pipeline() -> None:
    parallel = {"pipeline": 2, "partition": "uniform", "zero_stage": 1}
    plan = plan_of(ranks=4, train={"gradient_accumulation_steps": 6}, parallel=parallel)
    assert bubble_of(plan) == pytest.approx(1 / 7)
    assert describe_pipeline(plan) == "2 stages of 2 layers, 1f1b: 6 micro-batches, bubble 14.3%"
    assert plan.explain().splitlines()[2] == f"pipeline: {describe_pipeline(plan)}"
    virtual = plan_of(ranks=4, parallel=parallel | {"virtual_stages": 2})
    assert describe_pipeline(virtual).startswith(
        "2 stages × 2 virtual of 1 layer, interleaved: 8 micro-batches, bubble"
    )
    assert "pipeline:" not in plan_of(ranks=4).explain()


def test_a_plan_explains_its_tensor_ranks() -> None:
    plan = plan_of(ranks=4, parallel={"tensor": 2, "zero_stage": 1})
    assert f"tensor: {describe_tensor(plan)}" in plan.explain().splitlines()
    assert "tensor: " not in plan_of(ranks=4).explain()


@pytest.mark.parametrize(("name", "virtual_stages"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 3)])
@pytest.mark.parametrize("pp", [2, 5, 16])
def test_no_fewer_micro_batches_are_enough(name: str, virtual_stages: int, pp: int) -> None:
    found = micro_batches_below(0.2, name, pp=pp, virtual_stages=virtual_stages)
    below, before = (
        bubble_fraction(name, pp=pp, micro_batches=count, virtual_stages=virtual_stages) for count in (found, found - 1)
    )
    assert below < 0.2 <= before
