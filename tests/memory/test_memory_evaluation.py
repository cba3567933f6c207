"""Evaluation is a phase of its own: a forward pass without gradients, on a batch of its own size."""

import pytest
from traced_models import CONFIGS, peaks, traced

import toolkit as tk
from toolkit.memory.estimate import estimate
from toolkit.memory.scenario import Scenario
from toolkit.memory.search.advice import find_savings
from toolkit.memory.search.estimator import Estimator
from toolkit.memory.trace.events import Marker

VOCABULARY, LENGTH, WIDTH = 128_256, 2048, 2048


def job(*, stage=2, held_out=True, **train):
    return tk.Job.model_validate(
        {
            "model": {"name": "llama-3.2-1b", "init": "random"},
            "cluster": {"gpu": "h100-sxm-80gb", "gpus_per_node": 4},
            "data": {"train": "org/set", **({"validation_fraction": 0.1} if held_out else {})},
            "train": {"sequence_length": LENGTH, "per_device_train_batch_size": 1, **train},
            "parallel": {"zero_stage": stage},
        }
    )


def report(**options):
    return estimate(tk.resolve(job(**options)))


# Experts after dense layers, and the plain ones; forward and backward of other kinds are traced in trace/test_run.py.
QUICK = ("deepseek_v3", "gpt2")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in CONFIGS]
)
def test_few_layers_give_what_all_give(name):
    few, whole = (
        traced(name, evaluation=True, marks_modules=True, all_layers=all_layers) for all_layers in (False, True)
    )
    assert few.forward == whole.forward
    assert few.backward == ()
    assert not any(isinstance(placed.event, Marker) and placed.event.kind == "gradient" for placed in few.forward)
    assert peaks(few)["forward"] < peaks(traced(name))["forward"]


@pytest.mark.parametrize("stage", [2, 3, *(pytest.param(stage, marks=pytest.mark.full) for stage in (0, 1))])
def test_the_logits_of_a_validation_batch_lie_on_what_training_leaves(stage):
    found = report(stage=stage, per_device_eval_batch_size=6).fullest
    assert list(found.phases) == ["init", "forward", "backward", "step", "evaluation", "save"]
    phase = found.phases["evaluation"]
    # 16-bit logits, their fp32 copy and the log-softmax of that.
    logits = 6 * LENGTH * VOCABULARY * (2 + 4 + 4)
    assert phase.causes["logits and loss"] == pytest.approx(logits, rel=0.01)
    rest = phase.allocated_bytes - found.phases["save"].allocated_bytes - logits
    # Hidden states, and under stage 3 what is gathered; no layer keeps anything.
    assert 0 <= rest < 6 * LENGTH * WIDTH * 2 * 4 + (2 * VOCABULARY * WIDTH * 2 if stage == 3 else 0)
    assert sum(phase.causes.values()) == phase.allocated_bytes


def test_the_batch_of_an_evaluation_can_make_the_peak():
    small, large = (report(per_device_eval_batch_size=size) for size in (1, 16))
    assert small.limiting_phase != "evaluation"
    assert large.limiting_phase == "evaluation"
    assert large.peak_allocated_bytes > small.peak_allocated_bytes
    for phase in ("forward", "backward", "step"):
        assert large.fullest.phases[phase] == small.fullest.phases[phase]
    chunked = report(per_device_eval_batch_size=16, loss="chunked")
    assert chunked.fullest.phases["evaluation"].allocated_bytes < 0.3 * large.peak_allocated_bytes


def test_without_validation_data_there_is_no_such_phase():
    assert "evaluation" not in report(held_out=False).fullest.phases
    assert not any("evaluation" in line for line in report().assumptions)


def test_a_smaller_validation_batch_is_advised_where_it_helps():
    case, estimator = Scenario.of(job(per_device_eval_batch_size=16)), Estimator()
    plan = case.plan()
    savings = find_savings(estimator, case, plan=plan, report=estimator.estimate_plan(plan, case), at_most=9)
    (saving,) = [saving for saving in savings if saving.change.kind == "evaluation"]
    assert saving.to_dict()["set"] == {"train.per_device_eval_batch_size": 1}
    changed = estimator.estimate(case.changed(saving.to_dict()["set"]))
    assert changed.limiting_phase != "evaluation"
    assert saving.required_bytes == changed.required_bytes
    assert estimator.num_traces == 5, "training and evaluation, each with both losses, and the smaller evaluation"


def test_the_picture_shows_it(tmp_path):
    path = tmp_path / "phases.svg"
    report(per_device_eval_batch_size=16).plot(path)
    assert "evaluation" in path.read_text(encoding="utf-8")
