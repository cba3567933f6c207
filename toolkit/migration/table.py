"""How the keys of a tool are described: rows of one key each, and subjects that read several keys together."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from toolkit.migration.reading import Reading

_INDEX = re.compile(r"\[\d+\]")
# Far more than any configuration has; a few lines of nested aliases can stand for billions.
_MOST_VALUES, _MOST_LEVELS = 20_000, 32
# Values with which a key that is not carried changes nothing.
OFF: tuple[Any, ...] = (None, False, "", 0, "no", "none", "None", "false", "False")

# Why the sizes of tools that share rows among ranks are not carried, and the nearest way in a job.
SHARED_ROWS, SHARE_ROWS = "rows are shared as DeepSpeed-Ulysses does, under ZeRO alone", "Set parallel.context"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One key of a tool that is dealt with on its own.

    Args:
        key: Its path; `[]` stands for any item of a list, and a section named here is one value.
        kind: Whether it is carried, not needed, or not carried unless its value changes nothing.
        to: Key of the job, of a carried one.
        values: Values of the job by the tool's, in lower case; others are not carried. None: the value itself.
        convert: Function from the tool's value to the job's; ValueError with the reason for a value that is not carried.
        off: Values of a key that is not carried with which it changes nothing.
        reason: Why it is not needed or not carried.
        fix: The nearest way in a job.
    """

    key: str
    kind: Literal["carried", "not needed", "not carried"]
    to: str = ""
    values: Mapping[str, Any] | None = None
    convert: Callable[[Any], Any] | None = None
    off: tuple[Any, ...] = OFF
    reason: str = ""
    fix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Several keys that are read together.

    Args:
        keys: Their paths.
        to: Keys of the job that they decide.
        says: How, in a sentence for the documentation.
        run: Function that deals with all of them.
    """

    keys: tuple[str, ...]
    to: tuple[str, ...]
    says: str
    run: Callable[[Reading], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """All keys of a tool's files that are known.

    Args:
        tool: Name of the tool.
        rows: Keys that are dealt with one by one.
        subjects: Keys that are read together, in the order in which they are read.
        defaults: The tool's own values of keys that a file leaves out, where a job has to state them.
        aliases: The tool's names of keys that subjects call by the names of TrainingArguments.
        source: What the table was made from, for the documentation.
        has_whole: Whether a section that a key names is one value; otherwise only its keys are.
    """

    tool: str
    rows: tuple[Row, ...]
    subjects: tuple[Subject, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    source: str = ""
    has_whole: bool = True

    @property
    def row_of(self) -> dict[str, Row]:
        """The rows by key."""
        return {row.key: row for row in self.rows}

    @property
    def keys(self) -> frozenset[str]:
        """The paths of all keys."""
        named = {self.aliases.get(key, key) for subject in self.subjects for key in subject.keys}
        return frozenset({*named, *(row.key for row in self.rows)})

    @property
    def names(self) -> frozenset[str]:
        """The first parts of all keys: what a file may have at its top level."""
        return frozenset(re.split(r"[.\[]", key, maxsplit=1)[0] for key in self.keys)


def pattern_of(key: str) -> str:
    """Return the path of a key in a table: that of any item in place of a numbered one.

    >>> pattern_of("datasets[0].path")
    'datasets[].path'
    """
    return _INDEX.sub("[]", key)


def carried(key: str, to: str, **options: Any) -> Row:
    """Return the row of a key that a key of the job says."""
    return Row(key=key, kind="carried", to=to, **options)


def not_needed(reason: str, keys: str) -> Iterator[Row]:
    """Yield rows of keys, written with blanks between, that a job does without, for one reason."""
    return (Row(key=key, kind="not needed", reason=reason) for key in keys.split())


def not_carried(reason: str, keys: str, *, fix: str = "", off: tuple[Any, ...] = OFF) -> Iterator[Row]:
    """Yield rows of keys, written with blanks between, that no job can say, for one reason."""
    return (Row(key=key, kind="not carried", reason=reason, fix=fix, off=off) for key in keys.split())


def size_fault(document: Mapping[str, Any]) -> str:
    """Return why a document is no configuration by its size, with aliases expanded; empty for one that may be."""
    values = 0
    left: list[tuple[Any, int]] = [(document, 1)]
    while left:
        value, level = left.pop()
        inner: list[Any] = list(value.values()) if isinstance(value, Mapping) else list(value)
        values += len(inner)
        if values > _MOST_VALUES:
            return f"has more than {_MOST_VALUES:,} values"
        if level > _MOST_LEVELS:
            return f"is nested deeper than {_MOST_LEVELS} levels"
        left += [(each, level + 1) for each in inner if isinstance(each, Mapping | list)]
    return ""


def flattened(document: Mapping[str, Any], whole: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of each key, into sections and lists of sections, but not into those in `whole`.

    >>> list(flattened({"a": {"b": 1}, "c": [{"d": 2}], "e": {"f": 3}}, ["e"]))
    [('a.b', 1), ('c[0].d', 2), ('e', {'f': 3})]
    """
    kept = frozenset(whole)

    def walk(value: Any, path: str) -> Iterator[tuple[str, Any]]:
        if pattern_of(path) in kept:
            yield path, value
        elif isinstance(value, Mapping) and value:
            for key, item in value.items():
                yield from walk(item, f"{path}.{key}" if path else str(key))
        elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            for at, item in enumerate(value):
                yield from walk(item, f"{path}[{at}]")
        else:
            yield path, value

    for key, item in document.items():
        yield from walk(item, str(key))
