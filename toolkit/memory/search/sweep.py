"""Every combination of some values of a job, estimated: which of them fit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolkit.config.job import Parallel, Train
from toolkit.config.loader import apply_override
from toolkit.config.schema import names_of
from toolkit.config.suggestions import nearest_key
from toolkit.errors import Problem, SpecError
from toolkit.memory.scenario import Outcome, Scenario

if TYPE_CHECKING:
    from toolkit.memory.search.estimator import Estimator

# Most combinations of one sweep: each may need a trace, which takes seconds.
MAX_COMBINATIONS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One key and its values.

    Args:
        key: Dotted key of the job.
        values: Values as YAML reads them.
    """

    key: str
    values: tuple[Any, ...]

    @property
    def name(self) -> str:
        """Key without its section."""
        return self.key.rpartition(".")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """One combination and its outcome."""

    values: dict[str, Any]
    outcome: Outcome


def read_axes(options: Sequence[str]) -> tuple[Axis, ...]:
    """Read `per_device_train_batch_size=1,2,4`; the key is one of train or parallel, with or without its section.

    Raises:
        SpecError: SWEEP_SYNTAX, SWEEP_KEY, SWEEP_SIZE.
    """
    axes = tuple(_axis(option) for option in options)
    names = [axis.key for axis in axes]
    for key in names:
        if names.count(key) > 1:
            raise _syntax(key, "is swept twice", "Give all its values in one --sweep")
    count = math.prod(len(axis.values) for axis in axes)
    if count > MAX_COMBINATIONS:
        raise SpecError.of(
            code="SWEEP_SIZE",
            key="--sweep",
            message=f"{' × '.join(str(len(axis.values)) for axis in axes)} = {count} combinations are more than "
            f"{MAX_COMBINATIONS}: each may take seconds",
            fix="Give fewer values",
        )
    return axes


def sweep(estimator: Estimator, case: Scenario, axes: Sequence[Axis]) -> Iterator[SweepRow]:
    """Estimate each combination, the last axis fastest."""
    for combination in itertools.product(*(axis.values for axis in axes)):
        values = {axis.key: value for axis, value in zip(axes, combination, strict=True)}
        yield SweepRow(values=values, outcome=estimator.attempt(case, values))


def _axis(option: str) -> Axis:
    key, separator, text = option.partition("=")
    key = key.strip()
    parts = [part.strip() for part in text.split(",")]
    if not separator or not key or not all(parts):
        raise _syntax(option, "is not KEY=VALUE,VALUE", "Write --sweep per_device_train_batch_size=1,2,4")
    values = tuple(_value(part) for part in parts)
    if len(set(map(repr, values))) < len(values):
        raise _syntax(option, "has a value twice", "Give each value once")
    return Axis(key=_full_key(key), values=values)


def _value(text: str) -> Any:
    document: dict[str, Any] = {}
    apply_override(document, f"value={text}")
    return document["value"]


def _full_key(key: str) -> str:
    sections = {"train": names_of(Train), "parallel": names_of(Parallel)}
    section, dot, name = key.partition(".")
    if dot and name in sections.get(section, {}):
        return f"{section}.{sections[section][name]}"
    found = [f"{section}.{names[key]}" for section, names in sections.items() if key in names]
    if found and not dot:
        return found[0]
    known = [*Train.model_fields, *Parallel.model_fields]
    near = nearest_key(key, known, n=2)
    raise SpecError(
        Problem(
            code="SWEEP_KEY",
            key=key,
            message=f"--sweep {key}: not a key of train or parallel",
            fix=f"Did you mean {' or '.join(near)}" if near else "`toolkit validate --keys` lists them",
        )
    )


def _syntax(what: str, wrong: str, fix: str) -> SpecError:
    return SpecError.of(code="SWEEP_SYNTAX", key="--sweep", message=f"--sweep {what}: it {wrong}", fix=fix)
