"""The job as it is put together from several files: each value with its origin, and the values that contradict each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any, get_origin

from pydantic_core import PydanticUndefined

from toolkit.config.job import Job
from toolkit.config.schema import section_of
from toolkit.credentials import masked
from toolkit.deepspeed_spec.job_section import check_section
from toolkit.deepspeed_spec.nested import with_value
from toolkit.errors import Problem, SpecError
from toolkit.migration.outcomes import Leaf, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A value of the job that is being put together.

    Args:
        value: The value.
        leaves: Keys that it was read from; none for a default of the tool, which the job has to state.
        why: What to know about it, such as the tool whose default it is.
    """

    value: Any
    leaves: tuple[Leaf, ...] = ()
    why: str = ""

    @property
    def comment(self) -> str:
        """Where the value is from, for a comment beside it."""
        said = ", ".join(f"{leaf.path} ({leaf.place})" for leaf in self.leaves)
        return "; ".join(part for part in (said, self.why) if part)


@dataclass(slots=True)
class Draft:
    """Values of a job by dotted key; what a file says replaces a tool's default, and two files may not disagree."""

    values: dict[str, Value] = field(default_factory=dict)
    fixed: set[str] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def put(self, target: str, value: Any, leaves: tuple[Leaf, ...] = (), why: str = "") -> None:
        """Set a value, unless an option of the command has; a contradiction becomes a problem."""
        if target in self.fixed:
            return
        old = self.values.get(target)
        if old is not None and old.leaves:
            if leaves and not _same(old.value, value):
                self.problems.append(_contradiction(target, old, Value(value=value, leaves=leaves)))
            return
        if old is not None and not leaves:
            return
        self.values[target] = Value(value=value, leaves=leaves, why=why)

    def fix(self, target: str, value: Any, option: str) -> None:
        """Set a value that an option of the command gives; no file changes it."""
        self.values[target] = Value(value=value, why=option)
        self.fixed.add(target)

    def get(self, target: str) -> Any:
        """Return a value; None if there is none yet."""
        found = self.values.get(target)
        return None if found is None else found.value

    def is_said(self, target: str) -> bool:
        """Return whether a file or an option gives a value, rather than the default of a tool."""
        found = self.values.get(target)
        return found is not None and (bool(found.leaves) or target in self.fixed)

    def document(self) -> dict[str, Any]:
        """Return the job as nested mappings, without values that are the job's own defaults."""
        made: dict[str, Any] = {}
        for target, value in self.written().items():
            *parents, leaf = target.split(".")
            node = made
            for parent in parents:
                node = node.setdefault(parent, {})
            node[leaf] = value.value
        return made

    def written(self) -> dict[str, Value]:
        """Return the values that a job has to state, by key."""
        return {key: value for key, value in self.values.items() if not is_default(key, value.value)}


@cache
def default_of(target: str) -> Any:
    """Return the fixed default of a job's key; None if the rest of the job decides."""
    section: Any = Job
    for part in target.split("."):
        if section is None or part not in section.model_fields:
            return None
        found = section.model_fields[part]
        default = None if found.default is PydanticUndefined else found.default
        if get_origin(found.annotation) is dict:
            return None
        section = section_of(found.annotation)
    return default


def is_default(target: str, value: Any) -> bool:
    """Return whether a value is the fixed default of its key.

    >>> is_default("train.max_grad_norm", 1), is_default("train.seed", 42)
    (True, False)
    """
    default = default_of(target)
    if default is None:
        return False
    if isinstance(default, tuple):
        return isinstance(value, list | tuple) and tuple(value) == default
    return _same(default, value) or str(default) == value


def fault_of(target: str, value: Any) -> Problem | None:
    """Return why a job cannot have a value, by the schema of the job or DeepSpeed's; None if it can.

    >>> fault_of("train.lora.r", 2.5).code, fault_of("train.lora.r", 8)
    ('KEY_VALUE', None)
    """
    *parents, leaf = target.split(".")
    if parents[:1] == ["deepspeed"]:
        _, problems = check_section(with_value({}, target.partition(".")[2], value))
        return next(iter(problems), None)
    section: Any = Job
    for part in parents:
        section = section_of(section.model_fields[part].annotation) if part in section.model_fields else None
        if section is None:
            return None
    try:
        section(**{leaf: value})
    except SpecError as error:
        return next((problem for problem in error.problems if problem.key.startswith(target)), None)
    return None


def _same(one: Any, other: Any) -> bool:
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def _contradiction(target: str, old: Value, new: Value) -> Problem:
    first, second = old.leaves[0], new.leaves[0]
    return Problem(
        code="MIGRATE_CONTRADICTION",
        key=target,
        message=f"{first.path}={shown(first.told)} ({first.place}) and {second.path}={shown(second.told)} ({second.place}) are two values of "
        f"{target}: {shown(masked(old.value))} and {shown(masked(new.value))}",
        fix="Make both files say the same, or leave one of the two keys out",
    )
