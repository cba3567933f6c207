"""Arithmetic that orders the search: it must rank as exact estimates do, not agree with them."""

from __future__ import annotations

import pytest

import toolkit as tk
from toolkit.catalog.models import resolve_model
from toolkit.config.job import Job
from toolkit.cost import step_time
from toolkit.memory.scenario import Scenario
from toolkit.memory.search.estimator import Estimator
from toolkit.planner.bounds import Corrections, Setting, foresee, state_bytes
from toolkit.planner.clusters import Candidate
from toolkit.planner.make import ask
from toolkit.planner.options import setting_of
from toolkit.planner.shape import shape_of
from toolkit.planner.space import values_of

SETTING = Setting(1, 1, 2, "none", 1, 8, 1.0, "chunked", "eager", False)


@pytest.fixture(scope="module")
def question():
    return ask(
        Job.model_validate(
            {
                "model": "smollm2-360m",
                "cluster": {"gpu": "a100-sxm-80gb"},
                "train": {"sequence_length": 1024, "train_batch_size": 8},
            }
        )
    )


def seen(question, setting, corrections=None):
    shape = shape_of(question.job, question.model, sequence_length=1024)
    cluster = Candidate(gpu=question.gpus[0], gpus_per_node=1, nodes=1)
    return foresee(shape, cluster, setting, "bf16", corrections or Corrections())


def test_corrections_make_memory_exact_for_other_batches_and_shares(question):
    estimator, corrections = Estimator(), Corrections()
    cluster = Candidate(gpu=question.gpus[0], gpus_per_node=1, nodes=1)

    def exact(setting):
        case = Scenario(job=question.job, model=question.model, gpu=question.gpus[0])
        case = case.changed(values_of(question, cluster, setting))
        plan = case.plan()
        assert setting_of(plan) == setting
        return estimator.estimate_plan(plan, case).required_bytes

    first = SETTING._replace(micro=2, accumulation=4, checkpointing=0.0, loss="full")
    before = seen(question, first)
    corrections.learn_memory(first, before, exact(first))
    assert seen(question, first, corrections).required_bytes == pytest.approx(exact(first), rel=0.001)
    for other in (first._replace(micro=8, accumulation=1), first._replace(micro=4, accumulation=2)):
        assert seen(question, other, corrections).required_bytes == pytest.approx(exact(other), rel=0.15)


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ({"checkpointing": 0.0}, {"checkpointing": 1.0}),
        ({"compiled": True}, {}),
        ({"kernels": "liger"}, {}),
        ({}, {"offload": "optimizer-cpu"}),
        ({}, {"stage": 3}),
    ],
)
def test_what_is_faster(question, better, worse):
    assert seen(question, SETTING._replace(**better)).seconds < seen(question, SETTING._replace(**worse)).seconds


@pytest.mark.parametrize(
    ("less", "more"),
    [
        ({"checkpointing": 1.0}, {"checkpointing": 0.0}),
        ({"micro": 1}, {"micro": 4}),
        ({"loss": "chunked", "micro": 8}, {"loss": "full", "micro": 8}),
        ({"offload": "optimizer-cpu"}, {}),
    ],
)
def test_what_needs_less(question, less, more):
    assert (
        seen(question, SETTING._replace(**less)).required_bytes
        < seen(question, SETTING._replace(**more)).required_bytes
    )


def test_the_active_experts_alone_compute():
    job = Job.model_validate({"model": "mixtral-8x7b", "cluster": {"gpu": "h100-sxm-80gb"}})
    shape = shape_of(job, resolve_model(job.model), sequence_length=2048)
    assert shape.active < 0.3 * shape.parameters
    assert shape.inner == 2 * 14336


@pytest.mark.parametrize(
    "setting",
    [
        SETTING._replace(micro=2, accumulation=4, checkpointing=0.0, loss="full"),
        pytest.param(SETTING._replace(micro=4, accumulation=2, checkpointing=1.0, loss="full"), marks=pytest.mark.full),
        pytest.param(
            SETTING._replace(micro=8, accumulation=1, checkpointing=0.5, loss="chunked"), marks=pytest.mark.full
        ),
        SETTING._replace(micro=8, accumulation=1, checkpointing=0.0, loss="liger", kernels="liger"),
        SETTING._replace(micro=4, accumulation=2, checkpointing=0.0, stage=3, offload="optimizer-cpu"),
        SETTING._replace(micro=4, accumulation=2, checkpointing=0.0, loss="full", offload="full-cpu"),
    ],
    ids=lambda setting: f"{setting.loss}-{setting.kernels}-{setting.checkpointing}-{setting.stage}-{setting.offload}",
)
def test_times_are_near_to_exact_ones(setting):
    job = Job.model_validate(
        {
            "model": "llama-3.2-1b",
            "cluster": {"gpu": "h100-sxm-80gb"},
            "train": {"sequence_length": 2048, "train_batch_size": 8},
        }
    )
    question, estimator = ask(job, liger=True), Estimator()
    cluster = Candidate(gpu=question.gpus[0], gpus_per_node=1, nodes=1)
    shape = shape_of(question.job, question.model, sequence_length=2048)
    case = Scenario(job=question.job, model=question.model, gpu=question.gpus[0])
    plan = case.changed(values_of(question, cluster, setting)).plan()
    traces = estimator.traces(plan)
    exact = step_time(plan, traces).seconds
    assert foresee(shape, cluster, setting, "bf16", Corrections()).seconds == pytest.approx(exact, rel=0.2)
    if setting.offload == "full-cpu":
        assert plan.offload_engine == "overlapped"
        kept = tk.estimate(plan, traced=traces).host.bytes_per_rank
        _, host = state_bytes(shape, setting, 2, ranks=1)
        assert host == pytest.approx(sum(kept.values()) - kept["process"], rel=0.02)


def test_what_is_most_alike_corrects_a_time(question):
    corrections, gpu = Corrections(), question.gpus[0]
    sharded, whole = SETTING._replace(stage=3), SETTING
    corrections.learn_time(gpu, sharded, seen(question, sharded), 1.5 * seen(question, sharded).plain_seconds)
    corrections.learn_time(gpu, whole, seen(question, whole), 0.9 * seen(question, whole).plain_seconds)
    assert corrections.time_factor(gpu, sharded) == pytest.approx(1.5)
    assert corrections.time_factor(gpu, sharded._replace(kernels="liger")) == pytest.approx(1.5)
    assert corrections.time_factor(gpu, whole._replace(compiled=True)) == pytest.approx(0.9)
