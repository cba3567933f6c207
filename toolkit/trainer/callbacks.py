"""The classes that `train.callbacks` names: made once on every rank, their methods attached as the hooks of the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from toolkit.config.user_code import imported
from toolkit.engine.run import Run
from toolkit.errors import RunError
from toolkit.planning.plan import Plan

METHODS = ("on_step_end", "on_evaluation", "on_save", "on_end")
_KEY = "train.callbacks"


def make_callbacks(plan: Plan) -> tuple[Any, ...]:
    """Import and make the plan's callbacks, before anything else is started.

    Raises:
        SpecError: USER_CODE.
        RunError: CALLBACK, for a class that cannot be made without arguments, or has none of the methods.
    """
    return tuple(_made(name) for name in plan.job.train.callbacks)


def _made(name: str) -> Any:
    kind = imported(_KEY, name)
    try:
        callback = kind()
    except Exception as error:
        raise _refused(name, f"calling it without arguments raised {type(error).__name__}: {error}") from error
    if not any(callable(getattr(callback, method, None)) for method in METHODS):
        raise _refused(name, "it has no method that a run calls")
    return callback


def attach_callbacks(run: Run, callbacks: Sequence[Any]) -> None:
    """Attach the methods that the callbacks have, in the order of the job file."""
    for method, function in _methods(callbacks):
        getattr(run, method)(function)


def _methods(callbacks: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    for callback in callbacks:
        for method in METHODS:
            if (function := getattr(callback, method, None)) is not None:
                yield method, function


def _refused(name: str, why: str) -> RunError:
    return RunError.of(
        code="CALLBACK",
        key=_KEY,
        message=f"callbacks={name}: {why}",
        fix=f"Name a class that takes no arguments and has one or more of {', '.join(METHODS)}",
    )
