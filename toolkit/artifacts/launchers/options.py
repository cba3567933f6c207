"""What a launcher needs to know besides the plan."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from toolkit.errors import Problem, SpecError

_TIME = re.compile(r"(?:(\d+)-)?(\d{1,2}):([0-5]\d):([0-5]\d)")
# Control characters end a line of a file that has no way to escape them, such as one of #SBATCH.
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def _one_line(text: str) -> str:
    if not text.strip() or _CONTROL.search(text):
        raise ValueError("must be one line of text, without control characters")
    return text


def _duration(text: str) -> str:
    if not _TIME.fullmatch(text) or not _seconds(text):
        raise ValueError("must be HH:MM:SS or D-HH:MM:SS, such as 12:00:00 or 2-00:00:00")
    return text


def _word(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][\w.:,/+@-]*", text):
        raise ValueError("must be a name of letters, digits and . _ - : , / + @")
    return text


def _sbatch(text: str) -> str:
    if not re.fullmatch(r"[a-z][a-z-]*(=[^\s'\"\\]+)?", text):
        raise ValueError("must be an option of sbatch, without dashes before it, such as constraint=h100 or exclusive")
    name = text.partition("=")[0]
    if name in _OURS:
        raise ValueError(f"must not be {name}, which `toolkit emit` writes from the plan or from an option of its own")
    return text


_OURS = frozenset(
    {
        *(
            "job-name",
            "nodes",
            "ntasks",
            "ntasks-per-node",
            "gpus-per-node",
            "cpus-per-task",
            "time",
            "partition",
            "account",
        ),
        *("signal", "requeue", "no-requeue", "open-mode", "array"),
    }
)


def _seconds(text: str) -> int:
    found = _TIME.fullmatch(text)
    assert found is not None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


Line = Annotated[str, AfterValidator(_one_line)]
Word = Annotated[str, AfterValidator(_word)]


class LaunchOptions(BaseModel):
    """What the files of launchers say besides the plan; each launcher takes some of it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    if not TYPE_CHECKING:  # type checkers know the options without it

        def __init__(self, **given: Any) -> None:
            """Check the options.

            Raises:
                SpecError: EMIT_LAUNCH_OPTION, for each that is malformed or unknown.
            """
            try:
                super().__init__(**given)
            except ValidationError as error:
                problems = [_problem(fault["loc"], fault["input"], fault["msg"]) for fault in error.errors()]
                raise SpecError(*problems) from None

    image: Line | None = None
    """Container image with toolkit in it, or with Python and `setup`."""
    container: Literal["pyxis", "apptainer"] | None = None
    """What runs the image under SLURM: pyxis when left out."""
    time_limit: Annotated[str, AfterValidator(_duration)] | None = None
    """Longest time of the run, HH:MM:SS or D-HH:MM:SS."""
    partition: Word | None = None
    """SLURM's partition."""
    account: Word | None = None
    """SLURM's account."""
    sbatch: tuple[Annotated[str, AfterValidator(_sbatch)], ...] = ()
    """Further options of sbatch, without dashes before them: `constraint=h100`."""
    cpus: Annotated[int, Field(ge=1, le=1024, strict=True)] | None = None
    """CPU cores of each node that the job asks for."""
    volume: Word | None = None
    """Where the run keeps its files: a volume claim of Kubernetes, a volume of Modal or SkyPilot, a network volume of RunPod."""
    namespace: Word | None = None
    """Kubernetes namespace."""
    compute: Word | None = None
    """Azure ML's compute cluster, or SageMaker's instance type."""
    setup: Line | None = None
    """Shell command that installs toolkit where the image lacks it."""

    @property
    def seconds(self) -> int | None:
        """The time limit in seconds."""
        return None if self.time_limit is None else _seconds(self.time_limit)

    @property
    def given(self) -> tuple[str, ...]:
        """Names of the options that were given."""
        return tuple(name for name in type(self).model_fields if getattr(self, name) not in (None, ()))


def option_name(field: str) -> str:
    """Return the command-line option of a field of `LaunchOptions`."""
    return f"--{field.replace('_', '-')}"


def _problem(place: tuple[int | str, ...], value: object, message: str) -> Problem:
    name = option_name(str(place[0]))
    what = message.removeprefix("Value error, ")
    return Problem(
        code="EMIT_LAUNCH_OPTION",
        key=name,
        message=f"{name}={value} cannot be written to a launcher's file: it {what[0].lower()}{what[1:]}",
        fix=f"Change {name}, or leave it out",
    )
