"""Variables of a shell script where it can be read what they hold: not after a branch, a loop or a function that may have set them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, final

# What surrounds commands: `list` is commands joined by &&, || or |; `group` runs always and here.
Kind = Literal["branches", "case", "loop", "subshell", "function", "group", "list"]
_ARITHMETIC_ASSIGNMENT = re.compile(
    r"([A-Za-z_]\w*)\s*(?:\+\+|--|(?:<<|>>|[-+*/%&|^])?=(?!=))|(?:\+\+|--)\s*([A-Za-z_]\w*)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """A word of a statement.

    Args:
        text: Text without quotes, with known variables expanded.
        line: Line on which it begins, from 1.
        is_known: Whether the shell would change nothing of it.
    """

    text: str
    line: int
    is_known: bool = True


@dataclass(slots=True, kw_only=True)
class _Scope:
    kind: Kind
    values: Mapping[str, Word]
    exported: Mapping[str, Word]
    number: int = -1
    changed: dict[str, bool] = field(default_factory=dict)  # and whether it is exported


@final
class Variables:
    """The variables of a script at the place up to which it is read.

    Args:
        values: Those that are known before it starts.
        changed_in_loops: Names that each loop sets, by its number, from an earlier reading: a loop's commands follow its last ones.
    """

    def __init__(self, values: Mapping[str, Word], changed_in_loops: Mapping[int, frozenset[str]]) -> None:
        self.values, self.exported = dict(values), dict[str, Word]()
        self._before, self.changed_in_loops = changed_in_loops, dict[int, frozenset[str]]()
        self._scopes: list[_Scope] = []
        self._num_loops = 0

    def get(self, name: str) -> Word | None:
        """Return what a variable holds; None if the script has not set it."""
        return self.values.get(name)

    def set(self, values: Mapping[str, Word], *, exports: bool = False) -> None:
        """Set variables, and export them or what they are in the environment already."""
        self.values |= values
        self.exported |= {name: value for name, value in values.items() if exports or name in self.exported}
        for scope in self._scopes[-1:]:
            scope.changed |= {name: scope.changed.get(name, False) or name in self.exported for name in values}

    def export(self, names: Iterable[str]) -> None:
        """Export variables that are set."""
        self.set({name: self.values[name] for name in names if name in self.values}, exports=True)

    def forget(self, names: Iterable[str], line: int = 0) -> None:
        """Note that what variables hold is known no more."""
        self.set({name: Word(text=f"${name}", line=line, is_known=False) for name in names})

    def calculate(self, text: str, line: int) -> None:
        """Forget the variables that an arithmetic command sets."""
        self.forget((first or second for first, second in _ARITHMETIC_ASSIGNMENT.findall(text)), line)

    @property
    def innermost(self) -> Kind | None:
        """What surrounds the next command most closely."""
        return self._scopes[-1].kind if self._scopes else None

    def open(self, kind: Kind) -> None:
        """Begin something that surrounds commands."""
        self._scopes.append(_Scope(kind=kind, values=dict(self.values), exported=dict(self.exported)))
        if kind == "loop":
            self._scopes[-1].number = self._num_loops
            self.forget(self._before.get(self._num_loops, ()))
            self._num_loops += 1

    def next_branch(self) -> None:
        """Begin another branch, which sees nothing of those before it."""
        self.end_list()
        if self.innermost in ("branches", "case"):
            self.values, self.exported = dict(self._scopes[-1].values), dict(self._scopes[-1].exported)

    def close(self, *kinds: Kind) -> None:
        """End what surrounds the commands so far, if it is of one of these kinds."""
        self.end_list()
        if self.innermost in kinds:
            self._leave()

    def end_list(self) -> None:
        """End commands that are joined."""
        while self.innermost == "list":
            self._leave()

    def _leave(self) -> None:
        scope = self._scopes.pop()
        if scope.kind == "loop":
            self.changed_in_loops[scope.number] = frozenset(scope.changed)
        if scope.kind == "group":
            for outer in self._scopes[-1:]:
                outer.changed |= scope.changed
            return
        self.values, self.exported = dict(scope.values), dict(scope.exported)
        if scope.kind != "subshell":  # which changes nothing outside
            self.forget(scope.changed)
            self.export(name for name, is_exported in scope.changed.items() if is_exported)
