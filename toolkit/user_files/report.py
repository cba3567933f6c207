"""What is wrong with a user's files: one finding a fault, with its level, its place and, where it is known, its correction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from toolkit.credentials import MASK, masked, masked_text
from toolkit.errors import Problem, one_line
from toolkit.user_files.arguments import package_version
from toolkit.user_files.read import UserFile

# error: the run fails. warning: the run goes on without the value, or with another. note: the run is slower than need be.
Level = Literal["error", "warning", "note"]
LEVELS: tuple[Level, ...] = ("error", "warning", "note")
_PACKAGES = ("deepspeed", "accelerate", "transformers", "trl", "torch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """A change that corrects a file.

    Args:
        file: Name of the file.
        path: Parts of the key's path; of one part with a line's number for a file of lines.
        action: set writes `value`, remove takes the key out, line takes the line out.
        value: New value.
    """

    file: str
    path: tuple[str, ...]
    action: Literal["set", "remove", "line"]
    value: Any = field(default=None, hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One fault of a file, or of two that do not fit together.

    Args:
        level: What happens: error, warning or note.
        code: Stable name, listed in docs/errors.md; the rule of SARIF.
        file: Name of the file.
        line: Line of the key; None if the file as a whole is meant.
        key: Dotted path of the key.
        value: Value as it is written; "" if it is absent.
        message: What is wrong and which rule says so, without a full stop.
        fix: What to do, without a full stop.
        source: Library with its version, file and function that behaves so.
        edits: Changes that correct it; empty if only the user can decide.
    """

    level: Level
    code: str
    file: str
    line: int | None
    key: str
    value: str = ""
    message: str
    fix: str
    source: str = ""
    edits: tuple[Edit, ...] = ()

    def __post_init__(self) -> None:
        shown = masked(self.value, name=self.key)
        hidden = (self.value, self.value.strip()) if shown == MASK else ()
        for name in ("message", "fix"):
            text = getattr(self, name)
            text = masked_text(text, *hidden) if hidden else masked_text(text.replace(self.value or "\0", shown))
            object.__setattr__(self, name, one_line(text).rstrip("."))
        object.__setattr__(self, "value", shown)
        object.__setattr__(self, "key", masked_text(self.key))

    def __str__(self) -> str:
        file = one_line(self.file)
        place = f"{file}{'' if self.line is None else f', line {self.line}'}: "
        if self.line is None and self.message.startswith(f"{file} "):
            place = ""  # the message is about the file itself, and begins with its name
        origin = f" ({self.source})" if self.source else ""
        return f"{place}{self.message}{origin}. {self.fix}. [{self.code}]"

    def as_dict(self) -> dict[str, Any]:
        """Return the finding as the JSON object that `--json` prints."""
        return {
            **{name: getattr(self, name) for name in ("level", "code", "file", "line", "key", "value")},
            **{name: getattr(self, name) for name in ("message", "fix", "source")},
            "fixable": bool(self.edits),
        }

    @classmethod
    def of_problem(cls, problem: Problem, *, file: str, level: Level = "error", edits: tuple[Edit, ...] = ()) -> Found:
        """Return a problem of a file as a finding."""
        return cls(
            level=level,
            code=problem.code,
            file=problem.file or file,
            line=problem.line,
            key=problem.key,
            message=problem.message.removeprefix(f"{file}: ").removeprefix(f"{file}, line {problem.line}: "),
            fix=problem.fix,
            source=versioned(problem.source),
            edits=edits,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The verdict on some files.

    Args:
        files: The files, in the order in which they were named, then those that they name.
        found: Every finding: errors first, then by file and line.
        facts: What the files say together, one sentence each: ranks, batch.
    """

    files: tuple[UserFile, ...]
    found: tuple[Found, ...]
    facts: tuple[str, ...] = ()

    def count(self, level: Level) -> int:
        """Return the number of findings of a level."""
        return sum(each.level == level for each in self.found)

    @property
    def is_sound(self) -> bool:
        """Whether nothing fails."""
        return not self.count("error")


def ordered(found: Iterable[Found], files: Iterable[UserFile]) -> tuple[Found, ...]:
    """Return findings without repetitions: errors first, then by file and line."""
    rank: Mapping[str, int] = {file.name: index for index, file in enumerate(files)}
    once = dict.fromkeys(found)
    return tuple(
        sorted(once, key=lambda each: (LEVELS.index(each.level), rank.get(each.file, len(rank)), each.line or 0))
    )


def versioned(source: str) -> str:
    """Return a source with the version of its library: `deepspeed 0.19.8 runtime/config.py`."""
    package, blank, rest = source.partition(" ")
    if package not in _PACKAGES or not blank or rest[:1].isdigit():
        return source
    version = package_version(package)
    return f"{package} {version} {rest}" if version else source
