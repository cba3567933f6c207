"""The best value of a metric over a run's evaluations: which checkpoint is exported, and when a run ends early.

Both are kept in `run.state`, so a resumed run goes on with them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.checkpoint.layout import checkpoint_name
from toolkit.config.job import Train
from toolkit.errors import RunError
from toolkit.planning.plan import Plan

_KEY, _SAVED, _SEEN = "best", "saved", "seen"


class Best:
    """The best evaluation of a run, and the best one at which a checkpoint was saved.

    Args:
        plan: Resolved plan.
        state: `run.state`.
    """

    def __init__(self, plan: Plan, state: dict[str, Any]) -> None:
        self._plan, self._state, self._train = plan, state, plan.job.train

    @property
    def is_watched(self) -> bool:
        """Whether the job asks for the best model or for an early end."""
        return self._train.watches_metric

    def seen(self, metrics: Mapping[str, float]) -> None:
        """Take an evaluation into account.

        Raises:
            RunError: BEST_METRIC, if it has no such metric.
        """
        value, kept = self._value(metrics), self._kept()
        best = kept.get(_SEEN)
        threshold = self._train.early_stopping_threshold
        improved = _is_better(value, best, self._train) and (best is None or abs(value - best) > threshold)
        kept |= {"waited": 0 if improved else kept.get("waited", 0) + 1}
        if _is_better(value, best, self._train):
            kept[_SEEN] = value
        patience = self._train.early_stopping_patience
        kept["stopped"] = patience is not None and kept["waited"] >= patience
        self._state[_KEY] = kept

    def saved(self, metrics: Mapping[str, float], step: int) -> None:
        """Take into account that the evaluated weights are saved as the checkpoint of a step."""
        value, kept = self._value(metrics), self._kept()
        if _is_better(value, (kept.get(_SAVED) or {}).get("value"), self._train):
            self._state[_KEY] = {**kept, _SAVED: {"value": value, "step": step}}

    @property
    def stopped(self) -> bool:
        """Whether the metric has not improved for as many evaluations as the job allows."""
        return stopped_early(self._plan, self._state)

    @property
    def folder(self) -> Path | None:
        """The best checkpoint; None if the job does not ask for it, or none was saved."""
        return best_checkpoint(self._plan, self._state)

    @property
    def promised(self) -> Path | None:
        """The same, even while it is still being written."""
        return promised_checkpoint(self._plan, self._state)

    def _kept(self) -> dict[str, Any]:
        return dict(_kept(self._plan, self._state) or {"metric": self._train.best_metric})

    def _value(self, metrics: Mapping[str, float]) -> float:
        name = self._train.best_metric
        if name not in metrics:
            raise RunError.of(
                code="BEST_METRIC",
                key="train.metric_for_best_model",
                message=f"metric_for_best_model={name} is not among the metrics of an evaluation: {', '.join(metrics)}",
                fix="Name one of them",
            )
        return metrics[name]


def stopped_early(plan: Plan, state: Mapping[str, Any]) -> bool:
    """Return whether a run with this `run.state` has ended early, and its plan still asks for that."""
    kept = _kept(plan, state)
    return plan.job.train.early_stopping_patience is not None and bool(kept and kept.get("stopped"))


def best_checkpoint(plan: Plan, state: Mapping[str, Any]) -> Path | None:
    """Return the best checkpoint that a `run.state` names, if the plan asks for it and it is there."""
    folder = promised_checkpoint(plan, state)
    return folder if folder is not None and folder.is_dir() else None


def best_step(state: Mapping[str, Any]) -> int | None:
    """Return the step of the best checkpoint that a `run.state` names, whatever else hooks keep there."""
    kept = state.get(_KEY)
    saved = kept.get(_SAVED) if isinstance(kept, dict) else None
    step = saved.get("step") if isinstance(saved, dict) else None
    return step if type(step) is int else None


def promised_checkpoint(plan: Plan, state: Mapping[str, Any]) -> Path | None:
    """Return the same, whether it is there or not."""
    if not plan.job.train.load_best_model_at_end or _kept(plan, state) is None:
        return None
    step = best_step(state)
    return None if step is None else plan.output_dir / checkpoint_name(step)


def _kept(plan: Plan, state: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return what is kept of the plan's metric: that of another one says nothing."""
    kept = state.get(_KEY)
    return kept if isinstance(kept, dict) and kept.get("metric") == plan.job.train.best_metric else None


def _is_better(value: float, than: float | None, train: Train) -> bool:
    if math.isnan(value):
        return False
    return than is None or (value > than if train.best_is_greater else value < than)
