"""Trackers get the numbers of each record; one that fails is dropped with one warning."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tiny_plans import tiny_plan

from toolkit.launch.packages import package_problems, tracker_problems
from toolkit.planning.plan import Plan
from toolkit.trainer.trackers import Trackers


def _plan(folder: Path, *names: str) -> Plan:
    return tiny_plan(train={"report_to": names, "output_dir": str(folder)})


def test_tensorboard_gets_the_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    said: list[str] = []
    plan, state = _plan(tmp_path, "tensorboard"), {"mine": 1}
    trackers = Trackers(plan, state, resumed_step=0, say=said.append)
    for step in (1, 2, 3):
        trackers.log({"step": step, "loss": float(step), "mfu": None})
    trackers.close()
    trackers = Trackers(plan, state, resumed_step=1, say=said.append)  # what came after step 1 is gone there too
    trackers.log({"step": 2, "loss": 20.0})
    trackers.close()
    assert (said, state) == ([], {"mine": 1})
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert board.Tags()["scalars"] == ["train/loss"]
    assert [(event.step, event.value) for event in board.Scalars("train/loss")] == [(1, 1.0), (2, 20.0)]


class Wandb(ModuleType):
    """A stand-in of wandb: keeps what it is told, and fails at a step."""

    def __init__(self, *, fails_at: int = 0) -> None:
        super().__init__("wandb")
        self.begun: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.configured: dict[str, Any] = {}
        self.fails_at = fails_at
        self.config = SimpleNamespace(update=lambda values, allow_val_change: self.configured.update(values))

    def init(self, **options: Any) -> SimpleNamespace:
        self.begun.append(options)
        return SimpleNamespace(id=options.get("id", "new"), log=self._log, finish=lambda: None)

    def _log(self, values: dict[str, float], step: int) -> None:
        if step == self.fails_at:
            raise ConnectionError("no way\nto the host")
        self.logged.append((step, values))


def test_a_resumed_run_goes_on_in_the_same_run_of_the_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    state: dict[str, Any] = {}
    for resumed_step in (0, 5):
        Trackers(_plan(tmp_path / "run", "wandb"), state, resumed_step=resumed_step, say=pytest.fail).close()
    assert [(one["project"], one["name"], one.get("id")) for one in stand_in.begun] == [
        ("mine", "run", None),
        ("mine", "run", "new"),
    ]
    assert state == {"trackers": {"wandb": "new"}}
    assert stand_in.configured["train.learning_rate"] == 1e-5


def test_a_tracker_that_fails_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = Wandb(fails_at=2)
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    monkeypatch.setitem(sys.modules, "mlflow", None)  # its import raises
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "")
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES")
    said: list[str] = []
    trackers = Trackers(_plan(tmp_path, "mlflow", "wandb", "tensorboard"), {}, resumed_step=0, say=said.append)
    for step in (1, 2, 3):
        trackers.log({"step": step, "loss": 1.0})
    trackers.close()
    assert len(said) == 2
    assert "report_to=mlflow is given up" in said[0]
    waits = [os.environ[f"MLFLOW_HTTP_REQUEST_{name}"] for name in ("TIMEOUT", "MAX_RETRIES")]
    assert waits == ["5", "2"], "the user's own, and few where there is none"
    assert said[1].endswith("report_to=wandb is given up for this session: ConnectionError: no way to the host")
    assert stand_in.logged == [(1, {"train/loss": 1.0})]
    assert list((tmp_path / "tensorboard").iterdir())


def test_a_package_that_is_not_installed_is_an_error_before_the_start(tmp_path: Path) -> None:
    if importlib.util.find_spec("clearml"):
        pytest.skip("it is installed here")
    (problem,) = tracker_problems(["tensorboard", "clearml"])
    assert (problem.code, problem.key) == ("REPORT_PACKAGE", "train.report_to")
    assert "pip install clearml" in problem.fix
    assert problem in package_problems(_plan(tmp_path, "clearml"))
