"""What each rank of a pipeline holds, and the line that says how a step fares."""

from __future__ import annotations

import doctest

import pytest
from plan_jobs import plan_of

import toolkit.planning.stage_parts
from toolkit.pipeline_schedule import bubble_fraction
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
    whole = plan_of(model="mixtral-8x7b", ranks=4, parallel={"tensor": 4, "zero_stage": 1, "experts": "whole"})
    assert describe_tensor(whole).endswith("and 2 of 8 experts whole")


@pytest.mark.parametrize(("name", "virtual_stages"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 3)])
@pytest.mark.parametrize("pp", [2, 5, 16])
def test_no_fewer_micro_batches_are_enough(name: str, virtual_stages: int, pp: int) -> None:
    found = micro_batches_below(0.2, name, pp=pp, virtual_stages=virtual_stages)
    below, before = (
        bubble_fraction(name, pp=pp, micro_batches=count, virtual_stages=virtual_stages) for count in (found, found - 1)
    )
    assert below < 0.2 <= before
