"""What would save most: candidates leave the task alone, and one trace serves all that differ in the engine."""

from __future__ import annotations

import pytest

from toolkit.config.job import Job
from toolkit.memory.scenario import Scenario
from toolkit.memory.search.advice import Saving, candidates, find_savings
from toolkit.memory.search.estimator import Estimator
from toolkit.units import GIB

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


def changes(case: Scenario) -> dict[str, list[dict[str, object]]]:
    found: dict[str, list[dict[str, object]]] = {}
    for change in candidates(case.plan()):
        found.setdefault(change.kind, []).append({key: change.values[key] for key in change.shown})
    return found


def test_what_is_tried():
    found = changes(case_of(train={"gradient_checkpointing": 0.5, "attention": "eager"}))
    assert found["checkpointing"] == [{"train.gradient_checkpointing": True}]
    assert found["attention"] == [{"train.attention": "sdpa"}]
    assert found["loss"] == [{"train.loss": "chunked"}, {"train.loss": "liger"}]
    assert found["micro batch"] == [{"train.per_device_train_batch_size": 1, "train.gradient_accumulation_steps": 4}]
    assert found["zero"] == [{"parallel.zero_stage": 3}]
    assert found["optimizer offload"] == [{"parallel.offload": "optimizer-cpu"}]
    assert found["parameter offload"] == [{"parallel.offload": "full-cpu", "parallel.zero_stage": 3}]
    assert found["activations"] == [{"parallel.offload": "activations-cpu"}]
    assert found["bucket"] == [{"deepspeed.zero_optimization.reduce_bucket_size": 50_000_000}]
    assert found["gpus"] == [{"cluster.gpus_per_node": 4, "train.gradient_accumulation_steps": 1}]


def test_what_is_not_tried():
    found = changes(case_of(train={"per_device_train_batch_size": 1}, parallel={"zero_stage": 0}))
    assert found.keys() == {"loss", "zero", "optimizer offload", "parameter offload", "activations"}
    assert "gpus" not in changes(case_of(gpu="cpu"))
    assert changes(case_of(gpu="cpu"))["loss"] == [{"train.loss": "chunked"}]
    assert changes(case_of(train={"precision": "fp16"}))["loss"] == [{"train.loss": "chunked"}]
    assert "loss" not in changes(case_of(train={"loss": "liger"}))
    eight = changes(case_of(ranks=8))
    assert "cluster.nodes" in eight["gpus"][0]


@pytest.mark.parametrize("micro", [2, 3, 7, 11, 12])
def test_the_global_batch_stays(micro):
    case = case_of(train={"per_device_train_batch_size": micro})
    plan = case.plan()
    (change,) = [change for change in candidates(plan) if change.kind == "micro batch"]
    batch = case.changed(change.values).plan().settings.batch
    assert batch.train == plan.settings.batch.train
    assert batch.micro == 1


def test_more_cards_that_cannot_keep_the_batch_say_so():
    case = case_of(train={"gradient_accumulation_steps": 3})
    (change,) = [change for change in candidates(case.plan()) if change.kind == "gpus"]
    assert change.note == "the global batch becomes 24"
    assert case.changed(change.values).plan().settings.batch.train == 24


@pytest.mark.full
def test_the_loss_is_advised_where_its_logits_make_the_peak_with_what_the_estimate_saves():
    case = case_of(ranks=8, train={"sequence_length": 4096, "gradient_checkpointing": True}, parallel={"zero_stage": 3})
    estimator, plan = Estimator(), case.plan()
    report = estimator.estimate_plan(plan, case)
    saving = find_savings(estimator, case, plan=plan, report=report)[0]
    assert saving.to_dict()["set"].keys() == {"train.loss"}
    changed = estimator.estimate(case.changed(saving.to_dict()["set"]))
    assert saving.saved_bytes == report.required_bytes - changed.required_bytes > 5 * GIB
    short = case_of(train={"sequence_length": 64}, parallel={"zero_stage": 1})
    report = estimator.estimate(short)
    savings = find_savings(estimator, short, plan=short.plan(), report=report, at_most=9)
    assert "loss" not in {saving.change.kind for saving in savings}, "the step makes the peak"


def savings_of(case: Scenario, *, at_most: int = 10, estimator: Estimator | None = None) -> dict[str, Saving]:
    estimator, plan = estimator or Estimator(), case.plan()
    report = estimator.estimate(case)
    found = find_savings(estimator, case, plan=plan, report=report, at_most=at_most)
    return {saving.change.kind: saving for saving in found}


def test_the_largest_come_first_one_of_each_kind():
    case = case_of(train={"gradient_checkpointing": False, "sequence_length": 2048, "per_device_train_batch_size": 4})
    savings = savings_of(case)
    assert len(savings) >= 4
    saved = [saving.saved_bytes for saving in savings.values()]
    assert saved == sorted(saved, reverse=True)
    assert saved[-1] > 0


# 16 GiB of state on a card of 24 GB: the logits of eight sequences are what does not fit.
TOO_LARGE = {"gpu": "rtx-4090-24gb", "ranks": 4}
EIGHT = {"sequence_length": 2048, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}


def test_a_job_that_does_not_fit_gets_the_largest_micro_batch_that_does():
    case = case_of(**TOO_LARGE, train=EIGHT)
    estimator, plan = Estimator(), case.plan()
    assert not estimator.estimate(case).fits
    found = savings_of(case, estimator=estimator)
    saving = found["micro batch"]
    assert saving.fits
    micro, accumulation = saving.to_dict()["set"].values()
    assert micro * accumulation == 8
    assert 1 < micro < 8

    def fits(size):
        values = {"train.per_device_train_batch_size": size, "train.gradient_accumulation_steps": 8 // size}
        return estimator.estimate(case.changed(values)).fits

    assert fits(micro)
    assert not fits(2 * micro)
    assert saving.required_bytes == estimator.estimate(case.changed(saving.to_dict()["set"])).required_bytes
    assert case.changed(saving.to_dict()["set"]).plan().settings.batch.train == plan.settings.batch.train


def test_what_makes_it_fit_comes_before_what_saves_more():
    four = {**EIGHT, "per_device_train_batch_size": 4}
    case = case_of(gpu="rtx-4090-24gb", ranks=2, train=four, host_memory_gib=16)  # no room for an offload
    assert list(savings_of(case, at_most=3)) == ["loss", "micro batch", "gpus"]
    savings = savings_of(case)
    assert not savings["optimizer offload"].fits
    assert savings["optimizer offload"].saved_bytes > savings["gpus"].saved_bytes


def test_the_optimizer_on_the_cpu_is_offered_beside_all_on_the_cpu():
    savings = savings_of(case_of(), at_most=3)
    assert savings["optimizer offload"].to_dict()["set"] == {"parallel.offload": "optimizer-cpu"}
    assert savings["parameter offload"].to_dict()["set"]["parallel.offload"] == "full-cpu"
    assert savings["optimizer offload"].saved_bytes < savings["parameter offload"].saved_bytes


@pytest.mark.parametrize(
    "train", [{"gradient_checkpointing": False}, pytest.param({"attention": "eager"}, marks=pytest.mark.full)]
)
def test_no_trace_is_made_where_the_step_makes_the_peak(train):
    """What a batch takes is gone by then: none of the changes that need a trace changes that phase."""
    case = case_of(ranks=1, train={"sequence_length": 64, **train})
    estimator, plan = Estimator(), case.plan()
    report = estimator.estimate(case)
    assert report.limiting_phase == "step"
    savings_of(case, estimator=estimator)
    assert estimator.num_traces == 1
    for change in candidates(plan):
        if change.kind in ("checkpointing", "attention", "loss", "micro batch", "activations"):
            changed = estimator.attempt(case, change.values).report
            assert changed is None or changed.required_bytes >= report.required_bytes, change


@pytest.mark.parametrize(
    ("model", "gpu", "method"),
    [
        pytest.param("llama-3.1-8b", "h200-sxm-141gb", "full", marks=pytest.mark.full),
        ("llama-3.1-8b", "rtx-4090-24gb", "lora"),
        pytest.param("qwen3-0.6b", "t4-16gb", "full", marks=pytest.mark.full),
    ],
)
def test_the_stage_that_a_single_card_gets_is_the_one_that_needs_least(model, gpu, method):
    """Stage 3 shares nothing there: it helps only where its optimizer steps by sub-groups."""
    train = {"method": method, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 16}
    case = case_of(ranks=1, gpu=gpu, train=train, parallel={"zero_stage": None}).changed({"model.name": model})
    case = Scenario.of(case.job)
    estimator, chosen = Estimator(), case.plan().settings.zero_stage
    needed = {
        stage: estimator.estimate(case.changed({"parallel.zero_stage": stage})).required_bytes for stage in (2, 3)
    }
    assert needed[chosen] == min(needed.values())


def test_a_single_card_steps_all_parameters_at_once_where_that_fits_with_room():
    case = case_of(ranks=1, gpu="h100-sxm-80gb", parallel={"zero_stage": None}).changed({"model.name": "llama-3.2-3b"})
    case = Scenario.of(case.job)
    report = Estimator().estimate(case)
    assert case.plan().settings.zero_stage == 2
    assert report.limiting_phase == "step"
    assert report.fits
    assert not report.tight
