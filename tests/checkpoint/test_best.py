"""What counts as the best evaluation, and when a run ends early."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from plan_jobs import plan_of

from toolkit.checkpoint.best import Best, best_checkpoint, best_step, stopped_early
from toolkit.checkpoint.discovery import rotate
from toolkit.errors import RunError
from toolkit.planning.plan import Plan


def _plan(folder: Path | None = None, **train: Any) -> Plan:
    values = {"load_best_model_at_end": True, "compute_metrics": "a:b", **train}
    values |= {} if folder is None else {"output_dir": str(folder)}
    return plan_of(train=values, data={"train": "org/set", "validation_fraction": 0.1})


def _watch(plan: Plan, values: list[float]) -> tuple[dict[str, Any], int | None]:
    """The state after evaluations, each saved, and the step at which the run would end."""
    state: dict[str, Any] = {}
    best = Best(plan, state)
    for step, value in enumerate(values, start=1):
        best.seen({plan.job.train.best_metric: value})
        best.saved({plan.job.train.best_metric: value}, step)
        if best.stopped:
            return state, step
    return state, None


@pytest.mark.parametrize(
    ("train", "values", "step", "ends"),
    [
        ({}, [3.0, 2.0, 2.5, 1.5, 1.6], 4, None),
        ({}, [3.0, math.nan, 2.0, math.nan], 3, None),
        ({"metric_for_best_model": "accuracy"}, [0.1, 0.3, 0.2], 2, None),
        ({"metric_for_best_model": "accuracy", "greater_is_better": False}, [0.1, 0.3, 0.2], 1, None),
        ({"early_stopping_patience": 2}, [3.0, 3.0, 3.5, 1.0], 1, 3),
        ({"early_stopping_patience": 2}, [3.0, 3.5, 2.9, 3.0, 2.8], 5, None),
        ({"early_stopping_patience": 2, "early_stopping_threshold": 0.2}, [3.0, 2.9, 2.85, 1.0], 3, 3),
    ],
)
def test_the_best_and_the_end(tmp_path: Path, train: dict[str, Any], values: list[float], step: int, ends: int) -> None:
    plan = _plan(tmp_path, **train)
    state, ended = _watch(plan, values)
    assert ended == ends
    assert stopped_early(plan, state) is (ends is not None)
    assert best_checkpoint(plan, state) is None, "it is not there"
    (tmp_path / f"checkpoint-{step}").mkdir()
    assert best_checkpoint(plan, state) == tmp_path / f"checkpoint-{step}"


def test_what_was_kept_of_another_metric_says_nothing(tmp_path: Path) -> None:
    state, _ = _watch(_plan(early_stopping_patience=1), [1.0, 2.0])
    assert stopped_early(_plan(early_stopping_patience=5), state), "it has ended"
    other = _plan(early_stopping_patience=1, metric_for_best_model="accuracy")
    assert not stopped_early(other, state)
    assert not stopped_early(_plan(), state)


@pytest.mark.parametrize(
    "kept", [None, 3, [], {}, {"saved": [1]}, {"saved": {}}, {"saved": {"step": "2"}}, {"saved": {"step": True}}]
)
def test_whatever_else_hooks_keep_names_no_checkpoint(tmp_path: Path, kept: Any) -> None:
    (tmp_path / "checkpoint-1").mkdir()
    if isinstance(kept, dict):
        kept["metric"] = "eval_loss"
    assert best_step({"best": kept}) is None
    assert best_checkpoint(_plan(tmp_path), {"best": kept}) is None


def test_the_best_is_known_while_it_is_written(tmp_path: Path) -> None:
    """Behind the training: another save may begin before it is there, and must not delete it in its rotation."""
    plan, state = _plan(tmp_path), {}
    Best(plan, state).saved({"eval_loss": 1.0}, 2)
    assert Best(plan, state).folder is None
    assert Best(plan, state).promised == tmp_path / "checkpoint-2"
    assert Best(_plan(tmp_path, load_best_model_at_end=False, early_stopping_patience=1), state).promised is None


def test_an_unknown_metric_is_named() -> None:
    with pytest.raises(RunError, match="eval_loss, eval_accuracy") as caught:
        Best(_plan(metric_for_best_model="f1"), {}).seen({"eval_loss": 1.0, "eval_accuracy": 1.0})
    assert caught.value.codes == ("BEST_METRIC",)


@pytest.mark.parametrize(
    ("keep", "best", "left"), [(1, 1, [1, 4]), (2, 1, [1, 4]), (3, 1, [1, 3, 4]), (2, 3, [3, 4]), (1, 4, [4])]
)
def test_the_best_and_the_last_outlive_rotation(tmp_path: Path, keep: int, best: int, left: list[int]) -> None:
    for step in range(1, 5):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "manifest.json").write_text("{}")
    rotate(tmp_path, keep=keep, best=tmp_path / f"checkpoint-{best}")
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"checkpoint-{step}" for step in left]
