"""What `toolkit train` chooses before it starts, and when it leaves the fixed defaults."""

from __future__ import annotations

import pytest
from hostile_files import agree

from toolkit.checkpoint.state import State
from toolkit.cli import train_plan
from toolkit.cli.app import main
from toolkit.planning.resolve import resolve

JOB = """
model: {name: smollm2-135m, init: random, tokenizer: smollm}
cluster: {gpu: l4-24gb}
train: {sequence_length: 512, train_batch_size: 8, max_steps: 10, torch_compile: false}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


@pytest.fixture
def at_hand(monkeypatch):
    """Pretends that this machine has the cards of every plan."""
    monkeypatch.setattr("toolkit.launch.devices.card_problems", lambda plan: iter(()))


def test_the_fastest_settings_are_chosen_and_told_once(at_hand, capsys, folder):
    usual = resolve(folder / "job.yaml")
    chosen = train_plan.fastest_plan(usual, folder / "job.yaml")
    told = capsys.readouterr().err.strip().splitlines()
    assert len(told) == 1
    assert "--as-is" in told[0]
    assert chosen.settings.batch.train == usual.settings.batch.train == 8
    assert chosen.settings != usual.settings
    assert chosen.job.train.torch_compile is False
    assert {choice.source for choice in chosen.choices} >= {"job", "planner"}


def _saved(folder, job, **values):
    checkpoint = folder / "checkpoint-3"
    checkpoint.mkdir()
    plan = resolve(job.with_(values))
    plan.save(checkpoint / "plan.json")
    State(
        step=3,
        num_steps=10,
        zero_stage=plan.settings.zero_stage,
        world_size=plan.grid.world_size,
        train_batch_size=plan.settings.batch.train,
        saved_at=1e9,
        versions={},
    ).save(checkpoint)
    return agree(checkpoint), plan


def test_a_resume_on_other_cards_is_planned_for_them(at_hand, capsys, folder, monkeypatch):
    """With the batch and the arithmetic of the checkpoint; on the same ranks all settings are the checkpoint's."""
    (folder / "job.yaml").write_text(JOB.replace("train_batch_size: 8, ", ""))
    usual = resolve(folder / "job.yaml")
    two = {"cluster.gpus_per_node": 2, "train.kernels": "liger", "train.train_batch_size": 12}
    checkpoint, saved = _saved(folder, usual.job, **two)
    assert saved.grid.world_size == 2
    assert usual.grid.world_size == 1
    chosen = train_plan.fastest_plan(usual, folder / "job.yaml", resume=str(checkpoint))
    assert "--as-is" in capsys.readouterr().err
    assert chosen.settings.batch.train == 12 != usual.settings.batch.train
    assert chosen.settings.kernels == saved.settings.kernels != usual.settings.kernels
    assert chosen.grid == usual.grid
    monkeypatch.setattr("toolkit.planner.own.choose", None)  # a call would fail
    again = usual.job.with_({"cluster.gpus_per_node": 2, "train.train_batch_size": 12})
    kept = train_plan.fastest_plan(resolve(again), folder / "job.yaml", resume=str(checkpoint))
    assert kept.settings.kernels == saved.settings.kernels
    assert capsys.readouterr().err == ""


def test_without_the_cards_nothing_is_chosen(capsys, folder):
    usual = resolve(folder / "job.yaml")
    assert train_plan.fastest_plan(usual, folder / "job.yaml") is usual
    assert capsys.readouterr().err == ""


def test_on_cpu_nothing_changes(at_hand, folder):
    (folder / "job.yaml").write_text(JOB.replace("l4-24gb", "cpu"))
    usual = resolve(folder / "job.yaml")
    assert train_plan.fastest_plan(usual, folder / "job.yaml") is usual


def test_a_plan_file_is_taken_as_it_is(at_hand, folder):
    usual = resolve(folder / "job.yaml")
    usual.save(folder / "plan.json")
    assert train_plan.fastest_plan(usual, folder / "plan.json") is usual


@pytest.mark.parametrize("as_is", [False, True])
def test_as_is_takes_the_fixed_defaults(monkeypatch, folder, as_is):
    asked, shown = [], []
    monkeypatch.setattr("toolkit.cli.train.checked_plan", lambda job, overrides: resolve(job))
    monkeypatch.setattr("toolkit.cli.train.fastest_plan", lambda plan, job, **options: asked.append(job) or plan)
    monkeypatch.setattr("toolkit.cli.train._show", lambda plan, call, place, **options: shown.append(call))
    assert main(["train", "job.yaml", "--dry-run", *(["--as-is"] if as_is else [])]) == 0
    assert bool(asked) != as_is
    # The command that goes on says it, too.
    assert ("--as-is" in shown[0].command()) == as_is


def test_a_rank_of_another_launcher_decides_nothing(monkeypatch, folder):
    monkeypatch.setattr("toolkit.cli.train.checked_plan", lambda job, overrides: resolve(job))
    monkeypatch.setattr("toolkit.cli.train.fastest_plan", None)  # a call would fail
    monkeypatch.setattr("toolkit.cli.train._show", lambda plan, call, place, **options: None)
    torchrun = {
        "RANK": 1,
        "LOCAL_RANK": 1,
        "WORLD_SIZE": 2,
        "LOCAL_WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 29500,
    }
    for name, value in {**torchrun, "TORCHELASTIC_RUN_ID": "none"}.items():
        monkeypatch.setenv(name, str(value))
    (folder / "job.yaml").write_text(JOB.replace("l4-24gb", "l4-24gb, gpus_per_node: 2"))
    assert main(["train", "job.yaml", "--dry-run"]) == 0
