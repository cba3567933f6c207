"""Emitting is all or nothing, owns its files and spares a person's."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml

from toolkit.artifacts.contents import FILES
from toolkit.artifacts.files import emit, write_files
from toolkit.artifacts.launchers.catalogue import LAUNCHER_FILES
from toolkit.config.job import Job
from toolkit.errors import PlanError, RunError
from toolkit.planning.plan import Plan
from toolkit.planning.resolve import resolve


def make_plan(*, nodes=1, parallel=None, **train):
    cluster = {"gpu": "h100-sxm-80gb", "gpus_per_node": 4, "nodes": nodes}
    return resolve(Job(model="llama-3.1-8b", cluster=cluster, train=train, parallel=parallel or {}))


def snapshot(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_files_of_one_node(tmp_path):
    paths = emit(make_plan(), tmp_path / "a" / "out")
    assert [path.name for path in paths] == [name for name in FILES if name not in {"hostfile", *LAUNCHER_FILES}]
    assert all(path.is_file() for path in paths)
    assert os.access(tmp_path / "a/out/commands.sh", os.X_OK)
    assert sorted(snapshot(tmp_path / "a/out")) == sorted(path.name for path in paths), "nothing else is left behind"


def test_plan_json_is_the_plan(tmp_path):
    plan = make_plan()
    emit(plan, tmp_path)
    assert Plan.load(tmp_path / "plan.json") == plan


def test_files_name_each_other_by_the_folder_as_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    emit(make_plan(), "out")
    emit(make_plan(), tmp_path / "absolute")
    assert json.loads(Path("out/training_arguments.json").read_text())["deepspeed"] == "out/deepspeed-trainer.json"
    for folder in (Path("out"), tmp_path / "absolute"):
        accelerate = yaml.safe_load((folder / "accelerate.yaml").read_text())
        named = accelerate["deepspeed_config"]["deepspeed_config_file"]
        assert named == str(folder / "deepspeed-accelerate.json")
        assert Path(named).is_file()


def test_no_value_is_left_open(tmp_path):
    emit(make_plan(), tmp_path)
    for path in tmp_path.glob("*.json"):
        assert '"auto"' not in path.read_text() or path.name in ("plan.json", "provenance.json")


def test_a_stale_file_is_rewritten_and_named(tmp_path):
    emit(make_plan(gradient_accumulation_steps=32), tmp_path)
    result = write_files(make_plan(gradient_accumulation_steps=128), tmp_path)
    assert result.states["deepspeed.json"] == "rewritten"
    assert result.states["accelerate.yaml"] == "unchanged"
    assert json.loads((tmp_path / "deepspeed.json").read_text())["gradient_accumulation_steps"] == 128


def test_the_same_plan_changes_nothing(tmp_path):
    emit(make_plan(), tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert set(write_files(make_plan(), tmp_path).states.values()) == {"unchanged"}
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_a_hand_edit_is_undone_and_named(tmp_path):
    emit(make_plan(), tmp_path)
    (tmp_path / "deepspeed.json").write_text("{}")
    result = write_files(make_plan(), tmp_path)
    assert [name for name, state in result.states.items() if state == "edited"] == ["deepspeed.json"]
    assert json.loads((tmp_path / "deepspeed.json").read_text())["train_batch_size"] == 8


def test_what_a_consumer_cannot_carry_is_removed_and_explained(tmp_path):
    emit(make_plan(), tmp_path)
    result = write_files(make_plan(gradient_checkpointing=0.5), tmp_path)
    gone = {"deepspeed-trainer.json", "training_arguments.json", "deepspeed-accelerate.json", "accelerate.yaml"}
    assert {name for name, state in result.states.items() if state == "removed"} == gone == set(result.left_out)
    assert not gone & set(snapshot(tmp_path))
    left_out = json.loads((tmp_path / "provenance.json").read_text())["left_out"]
    assert {problem["code"] for name in gone for problem in left_out[name]} == {"INTEGRATION_CHECKPOINTING"}
    for name in ("commands.sh", "README.txt"):
        assert (tmp_path / name).read_text().count("INTEGRATION_CHECKPOINTING") == 1


def test_a_persons_file_of_the_same_name_is_never_lost(tmp_path):
    (tmp_path / "deepspeed.json").write_text("mine")
    (tmp_path / "hostfile").write_text("mine too")
    (tmp_path / "notes.md").write_text("and this")
    before = snapshot(tmp_path)
    with pytest.raises(PlanError) as caught:
        emit(make_plan(), tmp_path)
    assert caught.value.codes == ("EMIT_WOULD_OVERWRITE", "EMIT_WOULD_OVERWRITE")
    assert snapshot(tmp_path) == before


def test_other_files_stay(tmp_path):
    (tmp_path / "notes.md").write_text("keep")
    emit(make_plan(), tmp_path)
    emit(make_plan(seed=1), tmp_path)
    assert (tmp_path / "notes.md").read_text() == "keep"


def test_a_failure_in_the_middle_puts_everything_back(tmp_path, monkeypatch):
    emit(make_plan(), tmp_path)
    before = snapshot(tmp_path)
    replace, count = Path.replace, 0

    def fail_at_the_third(self, target):
        nonlocal count
        count += Path(target).parent == tmp_path
        if count == 3:
            raise OSError(28, "No space left on device", str(target))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", fail_at_the_third)
    with pytest.raises(RunError) as caught:
        emit(make_plan(gradient_checkpointing=0.5), tmp_path)
    assert caught.value.codes == ("EMIT_UNWRITABLE",)
    assert "No space left on device" in str(caught.value)
    assert snapshot(tmp_path) == before


def test_a_failed_first_emit_leaves_no_folder(tmp_path, monkeypatch):
    def full(self, *arguments, **options):
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(RunError):
        emit(make_plan(), tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_place_of_the_folder(tmp_path):
    (tmp_path / "out").write_text("a file")
    with pytest.raises(RunError) as caught:
        emit(make_plan(), tmp_path / "out")
    assert caught.value.codes == ("EMIT_UNWRITABLE",)
    assert (tmp_path / "out").read_text() == "a file"


def test_the_hostfile_comes_and_goes_with_the_hosts(tmp_path):
    emit(make_plan(nodes=2), tmp_path, hosts=["alpha", "beta.local"])
    assert (tmp_path / "hostfile").read_text() == "alpha slots=4\nbeta.local slots=4\n"
    assert write_files(make_plan(nodes=2), tmp_path).states["hostfile"] == "removed"
    assert not (tmp_path / "hostfile").exists()


@pytest.mark.parametrize(
    ("nodes", "hosts", "part"),
    [
        (1, ["alpha"], "nodes=1"),
        (2, ["alpha"], "1 hosts for nodes=2"),
        (2, ["alpha", "alpha"], "named twice"),
        (2, ["alpha", "be ta"], "not a host name"),
        (2, ["alpha", ""], "not a host name"),
    ],
)
def test_hosts_that_do_not_fit(tmp_path, nodes, hosts, part):
    with pytest.raises(PlanError, match=part) as caught:
        emit(make_plan(nodes=nodes), tmp_path / "out", hosts=hosts)
    assert set(caught.value.codes) == {"EMIT_HOSTS"}
    assert not (tmp_path / "out").exists()
