"""The trackers of `train.report_to`, through Accelerate's classes, on rank 0: what goes to metrics.jsonl goes to them too.

A tracker that fails, at its start or while training, is dropped with one warning: it never ends a run. Where a resumed run goes on
is kept in `run.state`, which checkpoints hold.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from toolkit.errors import one_line
from toolkit.planning.plan import Plan

PROJECT = "accelerator-toolkit"
_IDS = "trackers"

# Retries and seconds of a request to a server that does not answer: with MLflow's own 7 and 120 (environment_variables.py) all ranks
# would wait for minutes, or for longer than collectives do.
_MLFLOW_WAITS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}


class Trackers:
    """The trackers that a job reports to.

    Args:
        plan: Resolved plan.
        state: `run.state`: the ids of the trackers' runs are read and kept there.
        resumed_step: Step of the checkpoint; what TensorBoard has of later steps is dropped.
        say: Receiver of a line for each tracker that fails.
    """

    def __init__(self, plan: Plan, state: dict[str, Any], *, resumed_step: int, say: Callable[[str], None]) -> None:
        self._plan, self._say = plan, say
        self._trackers: dict[str, Any] = {}
        self._owns_accelerate = False
        if not plan.job.train.report_to:
            return
        ids = state.get(_IDS)
        known = dict(ids) if isinstance(ids, dict) else {}
        for name in plan.job.train.report_to:
            self._guarded(name, partial(self._start, name, known.get(name), resumed_step))
        found = {name: _ID_OF[name](one) for name, one in self._trackers.items() if name in _ID_OF}
        if kept := {**known, **{name: one for name, one in found.items() if one}}:
            state[_IDS] = kept

    def log(self, record: Mapping[str, Any]) -> None:
        """Pass the numbers of a record, which has a `step`, to each tracker."""
        values = {
            f"train/{name}": value
            for name, value in record.items()
            if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
        }
        for name in list(self._trackers):
            self._guarded(name, partial(self._trackers[name].log, values, step=record["step"]))

    def close(self) -> None:
        """End the trackers' runs."""
        for name in list(self._trackers):
            self._guarded(name, self._trackers[name].finish)
        self._trackers.clear()
        if self._owns_accelerate:
            from accelerate.state import PartialState

            PartialState._reset_state()
            self._owns_accelerate = False

    def _start(self, name: str, known: str | None, resumed_step: int) -> None:
        tracker = self._made(name, known, resumed_step)
        tracker.start()
        if name == "clearml":
            tracker.tracker.set_initial_iteration(0)  # ours count from the run's beginning
        if (
            name != "tensorboard" and known is None
        ):  # TensorBoard would open a second run for them; MLflow's cannot change
            tracker.store_init_configuration(_configuration(self._plan))
        self._trackers[name] = tracker

    def _made(self, name: str, known: str | None, resumed_step: int) -> Any:
        from accelerate import tracking
        from accelerate.state import PartialState

        if not PartialState._shared_state:  # Accelerate's loggers refuse to work without it
            PartialState(cpu=self._plan.on_cpu)
            self._owns_accelerate = True
        run_name = self._plan.output_dir.name
        if name == "tensorboard":
            return tracking.TensorBoardTracker(name, self._plan.output_dir, purge_step=resumed_step + 1)
        if name == "wandb":
            return tracking.WandBTracker(
                os.environ.get("WANDB_PROJECT", PROJECT),
                name=os.environ.get("WANDB_NAME", run_name),
                dir=os.environ.get("WANDB_DIR", str(self._plan.output_dir)),
                # Its copy of the console would replace the stream on which the progress bar is drawn.
                settings={"console": "off"},
                **({"id": known, "resume": "allow"} if known else {}),
            )
        if name == "trackio":
            return tracking.TrackioTracker(
                os.environ.get("TRACKIO_PROJECT", PROJECT),
                **({"name": known, "resume": "allow"} if known else {}),
            )
        if name == "mlflow":
            for variable, value in _MLFLOW_WAITS.items():
                os.environ.setdefault(variable, value)
            return tracking.MLflowTracker(experiment_name=PROJECT, run_id=known, run_name=run_name)
        return tracking.ClearMLTracker(
            PROJECT,
            task_name=os.environ.get("CLEARML_TASK", run_name),
            auto_connect_frameworks=False,
            auto_connect_arg_parser=False,
            **({"continue_last_task": known} if known else {"reuse_last_task_id": False}),
        )

    def _guarded(self, name: str, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # whatever a tracker's service raises
            self._trackers.pop(name, None)
            reason = one_line(str(error))[:300]
            self._say(f"warning: report_to={name} is given up for this session: {type(error).__name__}: {reason}")


# How each tracker's library names the run that a resumed one goes on in.
_ID_OF: Mapping[str, Callable[[Any], str | None]] = {
    "wandb": lambda one: str(one.tracker.id),
    "trackio": lambda one: str(one.tracker.name),
    "mlflow": lambda one: str(one.tracker.info.run_id),
    "clearml": lambda one: str(one.tracker.id),
}


def _configuration(plan: Plan) -> dict[str, Any]:
    """Return what was decided, by key, as values that every tracker shows."""
    values = {choice.key: choice.value for choice in plan.choices}
    plain = {key: value if isinstance(value, str | int | float) else str(value) for key, value in values.items()}
    return {"model": plan.model.name, **plain}
