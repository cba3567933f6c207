"""One file of a tool while it is read: its values, and what has become of each key so far."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from toolkit.config.suggestions import nearest_key
from toolkit.migration.draft import Draft, fault_of, is_default
from toolkit.migration.outcomes import Entry, Leaf, Outcome, shown
from toolkit.migration.table import Row, Table, pattern_of

# No file that a tool reads has more keys.
_MOST_LEAVES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """What the files say that are read together, as far as one depends on another.

    Args:
        deepspeed: Content of the DeepSpeed file; None if there is none.
        trainer: Whether one of the files has arguments of Trainer, or of a tool that is built on it.
        strategy: Whether a file other than the trainer's decides how the ranks share the model.
    """

    deepspeed: Mapping[str, Any] | None = None
    trainer: bool = False
    strategy: bool = False


@dataclass(slots=True, kw_only=True)
class Reading:
    """A file whose keys are being dealt with; each ends with one entry.

    Args:
        table: Table of its tool.
        leaves: Its values by path.
        draft: The job.
        together: What the other files say.
    """

    table: Table
    leaves: Mapping[str, Leaf]
    draft: Draft
    together: Together = Together()
    entries: dict[str, Entry] = field(default_factory=dict)

    def name(self, key: str) -> str:
        """Return the tool's name of a key of TrainingArguments."""
        return self.table.aliases.get(key, key)

    def given(self, key: str) -> bool:
        """Return whether the file has a key, and not as null."""
        leaf = self.leaves.get(self.name(key))
        return leaf is not None and leaf.value is not None

    def value(self, key: str) -> Any:
        """Return the value of a key, or the tool's default."""
        name = self.name(key)
        leaf = self.leaves.get(name)
        return self.table.defaults.get(name) if leaf is None or leaf.value is None else leaf.value

    def number(self, key: str) -> float | None:
        """Return the value of a key as a number; None if it is none."""
        return as_number(self.value(key))

    def is_on(self, key: str) -> bool:
        """Return whether a switch is on."""
        return as_bool(self.value(key)) is True

    def carry(self, target: str, value: Any, *keys: str, note: str = "") -> None:
        """Set a key of the job from keys of the file, or from the tool's default if the file has none of them."""
        leaves = tuple(self.leaves[self.name(key)] for key in dict.fromkeys(keys) if self.given(key))
        if (fault := fault_of(target, value)) is not None:
            for leaf in leaves:
                self._enter(leaf, "not carried", reason=fault.message, fix=fault.fix)
            return
        why = note or ("" if leaves else f"default of {self.table.tool}")
        self.draft.put(target, value, leaves, why)
        outcome: Outcome = "default" if is_default(target, value) else "carried"
        if target in self.draft.fixed:
            for leaf in leaves:
                self._enter(leaf, "not needed", reason=f"the option {self.draft.values[target].why} says it")
            return
        for leaf in leaves:
            self._enter(leaf, outcome, target=target, reason=note)

    def follow(self, key: str) -> None:
        """Note a key that names a DeepSpeed file, whose keys are dealt with themselves."""
        self.draft.put("parallel.strategy", "zero", tuple(self._leaves((key,))))
        for leaf in self._leaves((key,)):
            self._enter(leaf, "carried", target="parallel", reason="the keys of that file are read")

    def unneeded(self, reason: str, *keys: str) -> None:
        """Note keys without which the job says the same."""
        for leaf in self._leaves(keys):
            self._enter(leaf, "not needed", reason=reason)

    def refuse(self, reason: str, *keys: str, fix: str = "") -> None:
        """Note keys that the job does not say."""
        for leaf in self._leaves(keys):
            self._enter(leaf, "not carried", reason=reason, fix=fix)

    def finish(self) -> None:
        """Deal with the keys that no subject has: by their rows, and the unknown ones."""
        rows, known = self.table.row_of, self.table.keys
        for key, leaf in self.leaves.items():
            if key in self.entries:
                continue
            if key.startswith("<"):  # no key of a file
                self._enter(leaf, "not needed")
                continue
            row = rows.get(pattern_of(key))
            if leaf.value is None:
                self._enter(leaf, "not needed", reason="it is null, as if it were left out")
            elif row is None and pattern_of(key) in known:
                self._enter(
                    leaf, "not carried", reason=f"{shown(leaf.value)} is none of its values that are known here"
                )
            elif row is None:
                reason = f"{key} is no key of {self.table.tool} that is known here"
                self._enter(leaf, "not carried", reason=reason, fix=self._meant(key))
            else:
                self._by_row(leaf, row)

    def _meant(self, key: str) -> str:
        """Return the fix of a misspelt key; nothing in a file of very many keys, whose comparison would take long."""
        if len(self.leaves) > _MOST_LEAVES:
            return ""
        near = nearest_key(key, sorted(self.table.keys - self.leaves.keys()))
        return f"Did you mean {near[0]}" if near else ""

    def run(self) -> tuple[Entry, ...]:
        """Deal with all keys, and return their entries in the order of the file."""
        for subject in self.table.subjects:
            try:
                subject.run(self)
            except ValueError as error:  # a value that is none of its key's, which the message says
                self.refuse(str(error), *self._matching(subject.keys))
        for row in self.table.rows:
            if row.kind == "carried" and row.key in self.table.defaults and not self.given(row.key):
                self.carry(row.to, _converted(row, self.table.defaults[row.key]), row.key)
        self.finish()
        return tuple(self.entries[key] for key in self.leaves)

    def _matching(self, keys: tuple[str, ...]) -> list[str]:
        """Return the keys of the file that a subject reads and that have no entry yet."""
        names = {self.name(key) for key in keys}
        return [key for key in self.leaves if pattern_of(key) in names and key not in self.entries]

    def _by_row(self, leaf: Leaf, row: Row) -> None:
        if row.kind == "not needed":
            self._enter(leaf, "not needed", reason=row.reason)
        elif row.kind == "not carried":
            if is_off(leaf.value, row.off):
                self._enter(leaf, "not needed", reason=f"with {shown(leaf.value)} it changes nothing")
            else:
                self._enter(leaf, "not carried", reason=row.reason, fix=row.fix)
        else:
            try:
                value = _converted(row, leaf.value)
            except (ValueError, TypeError, AttributeError) as error:
                fix = row.fix or (
                    ""
                    if row.values is None
                    else f"{row.to} may be {', '.join(map(shown, dict.fromkeys(row.values.values())))}"
                )
                self._enter(leaf, "not carried", reason=row.reason or str(error), fix=fix)
                return
            self.carry(row.to, value, leaf.key, note=row.reason)

    def _leaves(self, keys: tuple[str, ...]) -> list[Leaf]:
        return [self.leaves[self.name(key)] for key in keys if self.name(key) in self.leaves]

    def _enter(self, leaf: Leaf, outcome: Outcome, *, target: str = "", reason: str = "", fix: str = "") -> None:
        kept = ("carried", "default")
        if leaf.value is None and outcome not in kept:
            outcome, reason, fix = "not needed", "it is null, as if it were left out", ""
        old = self.entries.get(leaf.key)
        if old is not None and outcome not in kept:
            return  # what was found first
        if old is not None and old.outcome in kept:
            # A key that decides several keys of the job is one entry.
            target = ", ".join(dict.fromkeys([*filter(None, old.target.split(", ")), target]))
            outcome = "carried" if "carried" in (old.outcome, outcome) else "default"
            reason = "; ".join(dict.fromkeys(filter(None, (old.reason, reason))))
        self.entries[leaf.key] = Entry(
            leaf=leaf, tool=self.table.tool, outcome=outcome, target=target, reason=reason, fix=fix
        )


def as_number(value: Any) -> float | None:
    """Return a number, also one written as text; None for everything else.

    >>> as_number("2e-5"), as_number(True), as_number("auto")
    (2e-05, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):  # a text, or a whole number of hundreds of digits
        return None
    if not math.isfinite(number):
        return None
    return int(number) if number.is_integer() and abs(number) < 1e15 and not isinstance(value, float) else number


def as_bool(value: Any) -> bool | None:
    """Return a truth value, also one written as text; None for everything else."""
    if isinstance(value, bool):
        return value
    return {"true": True, "false": False, "1": True, "0": False}.get(str(value).lower()) if value is not None else None


def as_list(value: Any) -> list[str]:
    """Return words as a list: a list, or a text with commas or blanks between.

    >>> as_list("q_proj, v_proj"), as_list(["a"]), as_list(None)
    (['q_proj', 'v_proj'], ['a'], [])
    """
    if isinstance(value, str):
        return [part for part in value.replace(",", " ").split() if part]
    return [str(item) for item in value] if isinstance(value, list | tuple) else []


def as_mapping(value: Any) -> dict[str, Any]:
    """Return a section, also one written as JSON on a command line; an empty one for everything else."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except ValueError:
            return {}
    return {str(key): item for key, item in value.items()} if isinstance(value, Mapping) else {}


def is_off(value: Any, off: tuple[Any, ...]) -> bool:
    """Return whether a value is one of those with which a key changes nothing."""
    if isinstance(value, list | tuple | Mapping):
        return not value
    return any(type(value) is type(each) and value == each for each in off) or (
        value == 0.0 and isinstance(value, float) and 0 in off
    )


def _converted(row: Row, value: Any) -> Any:
    if row.values is not None:
        found = str(value).lower()
        if found not in row.values:
            raise ValueError(f"{row.key}={shown(value)} has no equivalent")
        return row.values[found]
    return value if row.convert is None else row.convert(value)
