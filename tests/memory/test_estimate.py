"""`tk.estimate` is the same door as `toolkit estimate`: the same jobs, the same configurations, the same refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import toolkit as tk
from toolkit.deepspeed_spec.user_file import read_user_config
from toolkit.memory.deepspeed_file import DeepSpeedFile
from toolkit.memory.report.host_ranks import BUFFERS
from toolkit.memory.scenario import Scenario
from toolkit.memory.search.estimator import Estimator
from toolkit.units import format_bytes

JOB = tk.Job(
    model="quickstart-llama",
    cluster=tk.Cluster(gpu="h100-sxm-80gb", gpus_per_node=2),
    train=tk.Train(sequence_length=64, per_device_train_batch_size=1),
    parallel=tk.Parallel(zero_stage=2),
)
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": "auto"},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a key misspelt": ({"zero_optimisation": {"stage": 3}}, "zero_optimisation"),
    "a stage that is none": ({"zero_optimization": {"stage": 7}}, "stage"),
    "auto where Trainer fills in nothing": ({"zero_optimization": {"stage": "auto"}}, "stage"),
}


@pytest.fixture(scope="module")
def plan() -> tk.Plan:
    return tk.resolve(JOB)


def test_a_job_a_plan_and_their_files_are_one_case(plan: tk.Plan, tmp_path: Path) -> None:
    estimator = Estimator()
    wanted = estimator.estimate(Scenario.of(JOB))
    traced = estimator._trace(plan, keeps_inputs=False)
    (tmp_path / "job.yaml").write_text(
        yaml.safe_dump(JOB.model_dump(mode="json", exclude_unset=True)), encoding="utf-8"
    )
    plan.save(tmp_path / "plan.json")
    for given in (JOB, plan, tmp_path / "job.yaml", str(tmp_path / "plan.json")):
        assert tk.estimate(given, traced=traced) == wanted
    native = tk.estimate(plan, traced=traced, allocator="native")
    assert (native.allocator, wanted.allocator) == ("native", "expandable")


def test_a_configuration_of_one_s_own_is_priced_as_its_file_is(plan: tk.Plan, tmp_path: Path) -> None:
    path = tmp_path / "deepspeed_config"  # by its name in messages
    path.write_text(json.dumps(CONFIG), encoding="utf-8")
    estimator = Estimator()
    wanted = estimator.estimate(Scenario.of(JOB, file=DeepSpeedFile.read(path)))
    traced = estimator._trace(plan, keeps_inputs=False)
    for given in (JOB, plan):
        for config in (CONFIG, path, str(path)):
            assert tk.estimate(given, deepspeed_config=config, traced=traced) == wanted
    assert wanted.allocator == "native"
    assert any("zero_stage=3 of deepspeed_config instead of the job's 2" in line for line in wanted.assumptions)


@pytest.mark.parametrize("name", REFUSED)
def test_a_configuration_that_deepspeed_would_not_take_as_it_is_is_refused(name: str, plan: tk.Plan) -> None:
    config, key = REFUSED[name]
    with pytest.raises(tk.ToolkitError) as of_config:
        read_user_config(config)
    for given in (plan, JOB):
        with pytest.raises(tk.ToolkitError) as caught:
            tk.estimate(given, deepspeed_config=config)
        assert caught.value.problems == of_config.value.problems
        assert key in caught.value.problems[0].key


@pytest.mark.parametrize(
    ("arguments", "code", "key"),
    [
        ({"allocator": "anything"}, "ARGUMENT", "allocator"),
        ({"zero_init": "no"}, "ARGUMENT", "zero_init"),
        ({"zero_init": False}, "ZERO_INIT_STAGE", "--without-zero-init"),
        ({"deepspeed_config": 3}, "ARGUMENT", "deepspeed_config"),
        ({"deepspeed_config": "absent.json"}, "FILE_NOT_FOUND", "absent.json"),
        ({"calibration": {}}, "ARGUMENT", "calibration"),
        ({"traced": [3]}, "ARGUMENT", "traced"),
    ],
)
def test_an_argument_that_is_none_is_named(arguments: dict[str, Any], code: str, key: str, plan: tk.Plan) -> None:
    with pytest.raises(tk.ToolkitError) as caught:
        tk.estimate(plan, **arguments)
    assert [(problem.code, problem.key) for problem in caught.value.problems] == [(code, key)]


def test_what_was_put_together_by_hand_is_checked_first(plan: tk.Plan) -> None:
    with pytest.raises(tk.ToolkitError, match="PLAN_UNREADABLE"):
        tk.estimate(replace(plan, settings=replace(plan.settings, zero_stage=1)))
    with pytest.raises(tk.ToolkitError, match="Did you mean parallel"):
        tk.estimate(JOB.model_copy(update={"paralell": tk.Parallel()}))


def test_a_job_that_is_not_trained_can_be_estimated() -> None:
    job = JOB.with_(train={"optimizer": "adafactor"}, parallel={"strategy": "fsdp2", "zero_stage": None})
    with pytest.raises(tk.ToolkitError, match="STRATEGY_UNSUPPORTED"):
        tk.resolve(job)
    assert tk.estimate(job).fits


@pytest.mark.parametrize(("stage", "why"), [(2, "it flattens the gradients"), (3, "it takes norms in fp64")])
def test_what_deepspeeds_own_step_takes_beyond_the_peak_is_said(tmp_path: Path, stage: int, why: str) -> None:
    job = JOB.with_({"cluster.gpus_per_node": 1, "train.sequence_length": 16, "parallel.zero_stage": stage})
    # In small sub-groups the step takes less than the backward pass, until it takes the norm of the largest weight.
    given = job if stage < 3 else job.with_({"deepspeed": {"zero_optimization": {"sub_group_size": 10_000}}})
    estimator = Estimator()
    report = estimator.estimate(Scenario.of(given))
    assert report.limiting_phase == ("step" if stage == 2 else "backward")
    path = tmp_path / "own.json"
    path.write_text(json.dumps(tk.resolve(given).deepspeed_config()), encoding="utf-8")
    own = estimator.estimate(Scenario.of(job, file=DeepSpeedFile.read(path)))
    beyond = format_bytes(own.peak_allocated_bytes - report.peak_allocated_bytes)
    assert any(f"up to {beyond} beyond this peak: {why}" in line for line in report.assumptions)
    assert BUFFERS in report.host.bytes_per_rank
    assert BUFFERS not in own.host.bytes_per_rank
