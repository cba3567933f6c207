"""Estimates share the traces of all that differs in the engine alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from toolkit.config.job import Job
from toolkit.memory.estimate import estimate
from toolkit.memory.scenario import Scenario
from toolkit.memory.search.advice import Saving, find_savings
from toolkit.memory.search.estimator import Estimator
from toolkit.memory.search.tracing import shared_key
from toolkit.memory.trace.run import trace

pytestmark = pytest.mark.usefixtures("kept_traces")


def case_of(*, ranks=2, gpu="h100-sxm-80gb", train=None, parallel=None, **cluster) -> Scenario:
    values = {"sequence_length": 256, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    job = {
        "model": "llama-3.2-1b",
        "cluster": {"gpu": gpu, "gpus_per_node": ranks, **cluster},
        "train": {**values, **(train or {})},
        "parallel": {"zero_stage": 2, **(parallel or {})},
    }
    return Scenario.of(Job.model_validate(job))


def savings_of(case: Scenario, *, at_most: int = 10, estimator: Estimator | None = None) -> dict[str, Saving]:
    estimator, plan = estimator or Estimator(), case.plan()
    report = estimator.estimate(case)
    found = find_savings(estimator, case, plan=plan, report=report, at_most=at_most)
    return {saving.change.kind: saving for saving in found}


def test_traces_are_made_once_for_all_that_differs_in_the_engine():
    lines: list[str] = []
    estimator = Estimator(notify=lines.append)
    savings_of(case_of(train={"sequence_length": 4096}), estimator=estimator)
    # A smaller micro batch, moved inputs, and a loss without logits, after which no other is tried: three beside the first.
    assert estimator.num_traces == len(lines) == 4
    assert lines[0] == "tracing llama-3.2-1b, 2 × 4096 tokens"


@pytest.mark.parametrize(
    ("zero_stage", "checkpointing"),
    [
        pytest.param(
            stage, checkpointing, marks=() if (stage, checkpointing) in ((2, False), (3, True)) else pytest.mark.full
        )
        for stage in (0, 1, 2, 3)
        for checkpointing in (False, True)
    ],
)
def test_a_shared_trace_gives_what_a_trace_of_its_own_gives(zero_stage, checkpointing):
    case = case_of(train={"gradient_checkpointing": checkpointing}, parallel={"zero_stage": zero_stage})
    plan = case.plan()
    own = estimate(plan, traced=trace(plan, marks_modules=zero_stage == 3))
    assert Estimator().estimate(case) == own


@pytest.mark.parametrize(
    ("values", "same"),
    [
        ({"parallel.zero_stage": 3}, True),
        ({"parallel.offload": "optimizer-cpu"}, True),
        ({"train.gradient_accumulation_steps": 8}, True),
        ({"cluster.nodes": 4}, True),
        ({"cluster.gpu": "h200-sxm-141gb"}, True),
        ({"cluster.gpu": "a100-sxm-80gb"}, False),
        ({"cluster.gpu": "v100-sxm-32gb"}, False),
        ({"train.per_device_train_batch_size": 1}, False),
        ({"train.sequence_length": 128}, False),
        ({"train.attention": "eager"}, False),
        ({"train.precision": "fp32"}, False),
        ({"train.gradient_checkpointing": 0.5}, False),
        ({"train.method": "lora"}, False),
        ({"parallel.offload": "activations-cpu"}, False),
    ],
)
def test_what_a_trace_depends_on(values, same):
    case = case_of()
    assert (shared_key(case.plan()) == shared_key(case.changed(values).plan())) is same


def test_a_case_that_does_not_resolve_says_why():
    outcome = Estimator().attempt(case_of().changed({"parallel.offload": "full-cpu"}))
    assert [problem.code for problem in outcome.problems] == ["OFFLOAD_STAGE"]
    assert (outcome.fits, outcome.to_dict()["required_bytes"]) == (False, None)


def test_a_host_that_is_too_small_is_estimated_too():
    case = case_of(parallel={"offload": "optimizer-cpu"}, host_memory_gib=8)
    plan = case.plan()
    assert plan.job.cluster.host_memory_gib == 8
    report = Estimator().estimate(case)
    assert not report.host.fits
    assert report.host.capacity_bytes == 8 * 2**30


def test_a_model_given_is_not_read_again():
    case = case_of()
    renamed = replace(case.model, name="given")
    again = Scenario.of(case.job, model=renamed, gpu=case.gpu)
    assert again.plan().model.name == "given"
