"""Ranks of a tensor group that are given different batches are told so, all of them, before anything is computed."""

from __future__ import annotations

import pytest
from ranks import run_distributed
from tiny_plans import step_batches, tiny_plan

import toolkit as tk
from toolkit.errors import RunError
from toolkit.planning.plan import Plan


def told(rank: int, plan: Plan) -> tuple[tuple[str, ...], str]:
    with pytest.raises(RunError) as caught, tk.initialize(plan) as run:
        run.step(step_batches(0, ranks=4)[rank])  # by rank, as a script without tensor ranks draws
    return caught.value.codes, str(caught.value)


def same_but_for_a_label(rank: int, plan: Plan) -> list[str]:
    """The first step compares; a difference in one label of one micro-batch is enough."""
    found = []
    with tk.initialize(plan) as run:
        batch = step_batches(0)[run.world.coordinate.dp]
        run.step(batch)
        found.append("equal batches pass")
        other = [{name: value.clone() for name, value in micro.items()} for micro in batch]
        other[1]["labels"][0, 3] = rank
        run.step(other)  # later steps are not compared: a gather a step would wait for the card
        found.append("later steps are not compared")
    with pytest.raises(RunError, match="TP_BATCH"), tk.initialize(plan) as run:
        run.step(other)
    return found


@pytest.mark.gloo
def test_different_batches_in_a_group_end_every_rank() -> None:
    for codes, message in run_distributed(told, 4, tiny_plan(ranks=4, parallel={"tensor": 2})):
        assert codes == ("TP_BATCH",)
        assert "rank 1 got another batch than rank 0 of their replica 0, 1" in message
        assert "run.world.coordinate.dp" in message


@pytest.mark.gloo
def test_the_first_step_compares_every_number() -> None:
    for found in run_distributed(same_but_for_a_label, 2, tiny_plan(ranks=2, parallel={"tensor": 2, "zero_stage": 1})):
        assert len(found) == 2
