"""A run that is closed leaves none of its memory behind, and says so when it is asked for more."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from ranks import leave_group, run_distributed
from tiny_plans import step_batches, tiny_plan
from torch import nn

import toolkit as tk
from toolkit.errors import RunError

WAYS: dict[str, dict[str, Any]] = {
    "zero 0": {"zero_stage": 0},
    "zero 2": {"zero_stage": 2},
    "zero 3": {"zero_stage": 3},
    "streamed": {"zero_stage": 2, "offload": "full-cpu", "offload_engine": "overlapped"},
    "fsdp2": {"strategy": "fsdp2", "zero_stage": None},
}


def train_and_close(rank: int) -> dict[str, Any]:
    """Train each way in the same process, and keep the run that is closed, as a notebook does."""
    leave_group()
    left: dict[str, Any] = {}
    for way, parallel in WAYS.items():
        plan = tiny_plan(ranks=1, train={"optimizer": "adamw_torch"}, parallel=parallel)
        with tk.initialize(plan) as run:
            for step in range(3):
                run.step(step_batches(step, ranks=1)[0])
            held: list[weakref.ref[Any]] = [weakref.ref(run.engine), weakref.ref(run.model)]
            held += [weakref.ref(weight) for weight in run.model.parameters()]
        gc.collect()  # as a run on a card does by itself
        left[way] = sum(each() is not None for each in held)
        try:
            run.step(step_batches(3, ranks=1)[0])
        except RunError as error:
            left[way, "asked"] = error.problems[0].code
    return left


@pytest.mark.gloo
def test_nothing_of_a_closed_run_is_left_and_it_says_that_it_is_closed() -> None:
    left = run_distributed(train_and_close, 1)[0]
    assert left == dict.fromkeys(WAYS, 0) | {(way, "asked"): "RUN_CLOSED" for way in WAYS}


def test_the_model_of_a_closed_run_is_refused() -> None:
    with tk.initialize(tiny_plan(ranks=1)) as run:
        assert isinstance(run.model, nn.Module)
        assert run.learning_rate > 0
    for ask in (lambda: run.model, lambda: run.learning_rate, lambda: run.gradient_norm, lambda: run.set_num_steps(3)):
        with pytest.raises(RunError, match="the run is closed"):
            ask()
    assert run.engine is None
