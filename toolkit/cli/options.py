"""Arguments that commands share, and the functions that read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from toolkit.config.user_code import find_beside
from toolkit.errors import Problem, ToolkitError

if TYPE_CHECKING:
    from toolkit.config.job import Job
    from toolkit.planning.plan import Plan

T = TypeVar("T")

PYDANTIC_SWITCH, PYDANTIC_OFF = "PYDANTIC_DISABLE_PLUGINS", "__all__"


@dataclass(slots=True)
class Interaction:
    """What `main` needs to report the error of the command that ran; the context's `obj`."""

    as_json: bool = False
    job: Path | None = None
    overrides: Sequence[str] = ()


def note_json(context: typer.Context, value: bool) -> bool:
    """Record that errors are to be printed as JSON too."""
    if value and isinstance(context.obj, Interaction):
        context.obj.as_json = True
    return value


def note_job(context: typer.Context, value: Path | None) -> Path | None:
    """Record the job file, whose lines errors name."""
    if isinstance(context.obj, Interaction):
        context.obj.job = value
    return value


def note_overrides(context: typer.Context, value: list[str] | None) -> list[str] | None:
    """Record the keys that do not come from the job file."""
    if isinstance(context.obj, Interaction):
        context.obj.overrides = value or ()
    return value


_JOB_HELP = "Job file, or a plan.json that `toolkit emit` wrote."
JobArgument = Annotated[Path, typer.Argument(metavar="JOB", help=_JOB_HELP, show_default=False, callback=note_job)]
OptionalJobArgument = Annotated[
    Path | None, typer.Argument(metavar="[JOB]", help=_JOB_HELP, show_default=False, callback=note_job)
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change one value: --set train.sequence_length=8192. Repeatable.",
        callback=note_overrides,
    ),
]
JsonOption = Annotated[
    bool,
    typer.Option("--json", help="Print JSON on stdout, errors included.", is_eager=True, callback=note_json),
]


def collect(problems: list[Problem], read: Callable[[], T]) -> T | None:
    """Return what is read, or collect its problems and return None."""
    try:
        return read()
    except ToolkitError as error:
        problems.extend(error.problems)
        return None


def read_job(job: Path, overrides: Sequence[str] | None = None) -> Job:
    """Read a job file, or the job inside a plan.json.

    Raises:
        SpecError: With every unreadable, unknown, duplicate or mistyped key.
        PlanError: PLAN_UNREADABLE.
    """
    find_beside(job)
    if not is_plan_file(job):
        from toolkit.config.loader import load_job

        return load_job(job, overrides=tuple(overrides or ()))
    from toolkit.planning.plan import Plan

    return Plan.load(job).job.with_(*(overrides or ()))


def read_plan(job: Path, overrides: Sequence[str] | None = None) -> Plan:
    """Read and resolve a job file, or read a plan.json; overrides of a plan resolve it again.

    Raises:
        SpecError: The file, the model or the card cannot be read.
        PlanError: With every problem at once.
    """
    from toolkit.planning.plan import Plan
    from toolkit.planning.resolve import resolve, resolve_with

    find_beside(job)
    if not overrides:
        return resolve(job)
    if not is_plan_file(job):
        return resolve(read_job(job, overrides))
    plan = Plan.load(job)
    changed = plan.job.with_(*overrides)
    if changed.model == plan.job.model and changed.cluster.gpu == plan.job.cluster.gpu:
        return resolve_with(changed, model=plan.model, gpu=plan.gpu)
    return resolve(changed)


def is_plan_file(path: Path) -> bool:
    """Return whether a file is a plan.json rather than a job."""
    from toolkit.planning.read import is_plan_file

    return is_plan_file(path)
