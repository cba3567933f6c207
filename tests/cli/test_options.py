"""A command's JOB is a job file or a plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from toolkit.cli.app import main
from toolkit.cli.options import is_plan_file, read_job, read_plan
from toolkit.config.job import Job
from toolkit.errors import PlanError, SpecError
from toolkit.planning.resolve import resolve

JOB = "model: llama-3.1-8b\ncluster: {gpu: h100-sxm-80gb, gpus_per_node: 4}\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


def emit(*options):
    return main(["emit", "job.yaml", "--out", "out", *options])


def test_read_plan_of_a_job(folder):
    assert read_plan(Path("job.yaml"), ["train.seed=3"]) == resolve(
        Job(model="llama-3.1-8b", cluster={"gpu": "h100-sxm-80gb", "gpus_per_node": 4}, train={"seed": 3})
    )


def test_read_plan_of_a_plan(folder):
    emit()
    path = Path("out/plan.json")
    plan = read_plan(path)
    assert plan == read_plan(Path("job.yaml"))
    assert read_job(path) == plan.job
    assert read_plan(path, ["train.train_batch_size=64"]).settings.batch.train == 64
    other = read_plan(path, ["model=quickstart-llama", "train.sequence_length=64"])
    assert other.model.num_parameters == 1_000_576
    with pytest.raises(PlanError):
        read_plan(path, ["train.train_batch_size=7"])


def test_a_job_may_be_json(folder):
    Path("job.json").write_text(json.dumps({"model": "quickstart-llama", "cluster": {"gpu": "cpu"}}))
    assert not is_plan_file(Path("job.json"))
    assert read_plan(Path("job.json")).on_cpu


def test_files_that_are_neither(folder):
    Path("odd.json").write_text("[1]")
    with pytest.raises(SpecError):
        read_plan(Path("odd.json"))
    Path("plan.json").write_text('{"schema_version": 99}')
    with pytest.raises(PlanError) as caught:
        read_plan(Path("plan.json"))
    assert caught.value.codes == ("PLAN_UNREADABLE",)
    with pytest.raises(SpecError):
        read_plan(Path("absent.json"))
