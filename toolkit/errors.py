"""Errors that the user can act on: each names the key, the value, the rule and the fix.

A check never stops at the first fault: it collects `Problem`s and raises them together.
`docs/errors.md` explains every code; a test keeps both sets equal.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

INTERRUPTED_EXIT_CODE = 130  # 128 + SIGINT, as shells report it
OUT_OF_TIME_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: the same command again goes on

# Characters that break lines or that terminals interpret: control characters, separators, lone surrogates and marks of
# text direction.
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
# Characters of a longer text that are shown of either end.
_SHOWN_END = 2000
_LINE_BREAK = re.compile(r"\s*[\r\n]\s*")


def one_line(text: str) -> str:
    """Return foreign text on one line: line breaks become spaces, characters that terminals interpret are escaped."""
    joined = _LINE_BREAK.sub(" ", text.strip())
    return _UNPRINTABLE.sub(lambda found: found.group().encode("unicode_escape").decode("ascii"), joined)


def shortened(text: str) -> str:
    """Return a text without its middle if it is longer than any that was written to be read: a stranger's key of a megabyte."""
    return text if len(text) <= 2 * _SHOWN_END else f"{text[:_SHOWN_END]} … {text[-_SHOWN_END:]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One fault in the user's input, or one that occurred in a run.

    Args:
        code: Stable upper-case name, listed in docs/errors.md.
        key: Path of the offending key (`train.sequence_length`), a file, or "" if neither applies.
        message: `<name>=<got> <breaks which rule>: <why>`, without a full stop; put on one line, like `fix`.
        fix: What to do, with the exact valid values, without a full stop.
        source: Library file and function that would reject or ignore it, or "".
        file: File that contains the key, or "".
        line: Line of that file on which the key stands, or its section if the key is missing.
    """

    code: str
    key: str = ""
    message: str
    fix: str
    source: str = ""
    file: str = ""
    line: int | None = None

    def __post_init__(self) -> None:
        for name in ("message", "fix"):
            object.__setattr__(self, name, one_line(shortened(getattr(self, name))))
        object.__setattr__(self, "key", shortened(self.key))

    def __str__(self) -> str:
        return self._text(after="")

    @property
    def with_key(self) -> str:
        """The problem as text after its place and its key, unless the message has them."""
        name = one_line(self.key)
        return self._text(after="" if not name or name in self.message else f"{name}: ")

    def _text(self, *, after: str) -> str:
        place = f"{one_line(self.file)}, line {self.line}: " if self.file else ""
        origin = f" ({self.source})" if self.source else ""
        return f"{place}{after}{self.message}{origin}. {self.fix}. [{self.code}]"

    def as_dict(self) -> dict[str, Any]:
        """Return the problem as the JSON object that `--json` prints."""
        return {
            "code": self.code,
            "key": self.key,
            "message": self.message,
            "fix": self.fix,
            "source": self.source,
            "line": self.line,
        }


class ToolkitError(Exception):
    """Base of every error that is shown without a stack trace.

    Args:
        problems: One or more problems.
    """

    exit_code: ClassVar[int] = 2

    def __init__(self, *problems: Problem) -> None:
        if not problems:
            raise ValueError("ToolkitError needs at least one Problem")
        self.problems = problems
        super().__init__("\n".join(map(str, problems)))

    @property
    def codes(self) -> tuple[str, ...]:
        """Codes of all problems, in order."""
        return tuple(problem.code for problem in self.problems)

    @classmethod
    def of(cls, *, code: str, message: str, fix: str, key: str = "", source: str = "", line: int | None = None) -> Self:
        """Build an error of this class from one problem."""
        return cls(Problem(code=code, key=key, message=message, fix=fix, source=source, line=line))

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), self.problems)


class SpecError(ToolkitError):
    """The user's input cannot be read: YAML, a key, a type, a missing file."""


class PlanError(ToolkitError):
    """The job is readable, but no valid plan follows from it."""


class DataError(ToolkitError):
    """The data set or the tokenizer does not fit the job."""


class CheckpointError(ToolkitError):
    """A checkpoint is missing, incomplete, corrupt or of another shape."""


class CheckError(ToolkitError):
    """A check that the user requested failed."""

    exit_code = 1


class RunError(ToolkitError):
    """The run itself failed, or this machine cannot start it: a rank died, a disk or the RAM is full, a port is taken."""

    exit_code = 3


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error, without a full stop; its class if it has no message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")


def raise_all(error: type[ToolkitError], problems: Iterable[Problem]) -> None:
    """Raise one error with all problems, or return if there are none."""
    found = tuple(problems)
    if found:
        raise error(*found)
