"""`toolkit profile` runs a few steps, and shows where their time goes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from train_jobs import run_toolkit, write_inputs, write_job

from toolkit.cli.profile import profiled_plan
from toolkit.config.job import Job
from toolkit.planning.resolve import resolve


def test_the_plan_of_the_steps_alone(tmp_path: Path) -> None:
    train = {"callbacks": ["a:B"], "num_train_epochs": 3, "report_to": "tensorboard", "output_dir": "runs/mine"}
    job = {"model": "quickstart-llama", "cluster": {"gpu": "cpu"}, "train": train}
    plan = profiled_plan(resolve(Job.model_validate(job)))
    assert (plan.settings.max_steps, plan.settings.num_train_epochs) == (5, None)
    assert plan.output_dir == Path("runs/mine-profile")
    assert (plan.job.train.callbacks, plan.job.train.report_to) == ((), ())


@pytest.mark.full
def test_steps_of_a_job(tmp_path: Path) -> None:
    job = write_job(write_inputs(tmp_path), "run", train={"profile": {"active": 2}})
    done = run_toolkit(tmp_path, "profile", job, "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["steps"], found["device"]) == (0, 2, "cpu")
    assert len(list(Path(found["folder"]).glob("rank-*.json"))) == 2
    assert not (tmp_path / "run").exists()
    assert not list((tmp_path / "run-profile").glob("checkpoint-*"))
    done = run_toolkit(tmp_path, "profile", job)
    assert "matrix products" in done.stdout
    assert "no snapshot of memory" in done.stdout
