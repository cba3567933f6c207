"""What became of each key of a file: carried into the job, the job's default, not needed, or not carried."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from toolkit.credentials import MASK, masked, masked_text
from toolkit.errors import one_line, shortened

Outcome = Literal["carried", "default", "not needed", "not carried"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """A value of a file.

    Args:
        key: Its path, such as `datasets[0].path`; without dashes for an option of a command line.
        section: Section of the file that is a file of its own to another tool, with a dot; empty mostly.
        is_option: Whether it stands on a command line, which wins over files.
        value: The value.
        file: Name of the file, as the user named it.
        line: Its line; None where that is not known.
    """

    key: str
    value: Any
    file: str
    line: int | None = None
    section: str = ""
    is_option: bool = False

    @property
    def path(self) -> str:
        """The path of the key in the file."""
        return f"{self.section}{self.key}"

    @property
    def told(self) -> Any:
        """The value as reports repeat it: a mask in place of a token, key or password."""
        return masked(self.value, name=self.key)

    @property
    def place(self) -> str:
        """File and line, for comments and messages."""
        return self.file if self.line is None else f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What became of one key.

    Args:
        leaf: The key with its value and place.
        tool: Tool whose file it stands in.
        outcome: What became of it.
        target: Key of the job that says the same; several are joined by commas.
        reason: Why it is not needed or not carried; for a carried one what to know about it.
        fix: The nearest way in a job, where there is one.
    """

    leaf: Leaf
    tool: str
    outcome: Outcome
    target: str = ""
    reason: str = ""
    fix: str = ""

    def __post_init__(self) -> None:
        hidden = (self.leaf.value,) if self.leaf.told == MASK else ()
        for name in ("reason", "fix"):
            object.__setattr__(self, name, masked_text(getattr(self, name), *hidden))

    def as_dict(self) -> dict[str, Any]:
        """Return the entry as the JSON object that `--json` prints."""
        return {
            "file": self.leaf.file,
            "line": self.leaf.line,
            "tool": self.tool,
            "key": self.leaf.path,
            "value": plain(self.leaf.told),
            "outcome": self.outcome,
            "target": self.target,
            "reason": self.reason,
            "fix": self.fix,
        }


def plain(value: Any) -> Any:
    """Return a value as JSON can hold it: dates and the like as text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and value not in (float("inf"), float("-inf")) and value == value:
        return value
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def shown(value: Any) -> str:
    """Return a value on one line as YAML writes it, for messages."""
    if value is None or isinstance(value, bool):
        return str(value).lower() if value is not None else "null"
    return one_line(shortened(str(plain(value))))
