"""Defaults of a job, each with its reason, and their replacements where the rest of the job forbids them."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from toolkit.config.job import Card, Job
from toolkit.errors import Problem
from toolkit.planning.rules.training import unread
from toolkit.planning.settings import Choice, Source

T = TypeVar("T")

FIXED = "the fixed default"

# Most defaults that are changed together: DeepSpeed's BF16_Optimizer needs a stage and a dtype at once.
_AT_ONCE = 2


class Instead(NamedTuple):
    """Replacement of a default, and what the rules say about the default."""

    value: Any
    because: str


class Chooser:
    """The choices of a plan with their reasons, collected one by one.

    Args:
        job: Job as the user wrote it.
        instead: Replacements of defaults, by key.

    Attributes:
        choices: One entry per value, in the order in which they were made.
        others: Alternatives to the default of each open key.
    """

    def __init__(self, job: Job, *, instead: Mapping[str, Instead]) -> None:
        self.choices: list[Choice] = []
        self.others: dict[str, tuple[Any, ...]] = {}
        self._instead = instead
        for section in ("model", "cluster", "train", "parallel", "data"):
            part = getattr(job, section)
            if part is None:
                continue
            written = part.model_dump(mode="json")
            for name in written:
                if isinstance(card := getattr(part, name), Card):
                    self._add_card(card)
                elif name in part.model_fields_set and written[name] is not None:
                    self._add(f"{section}.{name}", written[name], "job", "written in the job")
                elif written[name] not in (None, [], {}) and not unread(job, f"{section}.{name}"):
                    self._add(f"{section}.{name}", written[name], "default", FIXED)
        for key, value in job.deepspeed.items():
            self._add(
                f"deepspeed.{key}", value, "deepspeed", "set in the job's deepspeed section, which takes precedence"
            )

    def _add_card(self, card: Card) -> None:
        self._add("cluster.gpu", card.name, "job", "described in the job")
        for name, value in card.model_dump(mode="json", exclude={"name"}, exclude_none=True).items():
            self._add(f"cluster.gpu.{name}", value, "job", "written in the job")

    def _add(self, key: str, value: Any, source: Source, reason: str) -> None:
        self.choices.append(Choice(key=key, value=value, source=source, reason=reason))

    def choose(self, key: str, given: T | None, default: T, reason: str, *, others: Sequence[T] = ()) -> T:
        """Return the job's value, or the default, and record the reason.

        Args:
            key: Dotted path as in the job file.
            given: Value in the job; None if it has none.
            default: Best value where nothing forbids it.
            reason: Reason for the default, as a clause.
            others: Alternatives where a rule refuses the default, best first.
        """
        if given is not None:
            return given
        self.others[key] = tuple(other for other in others if other != default)
        if key in self._instead:
            reason = f"{json.dumps(default)} would be refused: {self._instead[key].because}"
            default = self._instead[key].value
        self._add(key, default, "default", reason)
        return default

    def derive(self, key: str, value: T, reason: str) -> T:
        """Record a value that follows from others, in place of an earlier entry of the key."""
        self.choices = [choice for choice in self.choices if choice.key != key]
        self._add(key, value, "derived", reason)
        return value


def with_origins(problems: Iterable[Problem], choices: Iterable[Choice]) -> Iterator[Problem]:
    """Yield problems that tell of each value in their message that the user did not write who chose it, and why."""
    # Of the fixed defaults only names: that a count is 1 or a switch off unless the job says so needs no word.
    made = [
        choice
        for choice in choices
        if choice.source in ("default", "derived") and (choice.reason != FIXED or isinstance(choice.value, str))
    ]
    for problem in problems:
        said = [
            f"{name}={_spelled(choice.value)} is the toolkit's choice, not the job's: {choice.reason}"
            for choice in made
            if (name := choice.key.rpartition(".")[2]) and _names(problem.message, name, choice.value)
        ]
        yield replace(problem, message="; ".join((problem.message, *said))) if said else problem


def _names(message: str, name: str, value: Any) -> bool:
    return re.search(rf"\b{name}={re.escape(_spelled(value))}(?![\w.])", message) is not None


def _spelled(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def other_defaults(others: Mapping[str, Sequence[Any]], problems: Iterable[Problem]) -> Iterator[dict[str, Any]]:
    """Yield the changes to try in place of the defaults that problems name: of one key, then of two.

    The message of a rule names the values that it refuses, as `<name>=<value>`, or its fix names the key.

    Args:
        others: Alternatives to the default of each open key.
        problems: Problems that the rules find with the defaults.
    """
    said = set(re.findall(r"\w+", " ".join(f"{problem.message} {problem.fix}" for problem in problems)))
    keys = [key for key, values in others.items() if values and key.rpartition(".")[2] in said]
    for number in range(1, _AT_ONCE + 1):
        for changed in itertools.combinations(keys, number):
            for values in itertools.product(*(others[key] for key in changed)):
                yield dict(zip(changed, values, strict=True))
