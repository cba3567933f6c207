"""One job under several strategies: ZeRO stages, tensor ranks, DDP and FSDP2, with and without offload and checkpointing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolkit.errors import Problem, SpecError, raise_all
from toolkit.memory.case import Case, Outcome

if TYPE_CHECKING:
    from toolkit.memory.estimator import Estimator

_NAME = re.compile(
    r"(zero[0-3]|ddp|fsdp2)(?:-tp([1-9]\d*))?((?:-(?:offload|full-offload|no-checkpointing|checkpointing))*)"
)
_UNBUILT = re.compile(r"(?:.*-)?pp\d+.*")

# What a suffix sets.
_SUFFIXES: dict[str, dict[str, Any]] = {
    "offload": {"parallel.offload": "optimizer-cpu"},
    "full-offload": {"parallel.offload": "full-cpu"},
    "checkpointing": {"train.gradient_checkpointing": True},
    "no-checkpointing": {"train.gradient_checkpointing": False},
}
# Which stages have the partitions that an offload moves (plan/offload.py PROFILES).
_STAGES_OF = {"offload": ("zero1", "zero2", "zero3"), "full-offload": ("zero3",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A named strategy.

    Args:
        values: By dotted key of the job.
    """

    name: str
    values: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A strategy and what came of it."""

    strategy: Strategy
    outcome: Outcome


def read_strategies(text: str) -> tuple[Strategy, ...]:
    """Reads `zero2,zero3-offload,…`.

    Raises:
        SpecError: COMPARE_STRATEGY for each name that is none; COMPARE_NOT_BUILT for pipeline stages.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise SpecError(_no_strategy(text))
    problems = [
        _not_built(name) if _UNBUILT.fullmatch(name) else _no_strategy(name) for name in names if not _parts(name)
    ]
    problems += [_no_strategy(name, twice=True) for name in dict.fromkeys(names) if names.count(name) > 1]
    raise_all(SpecError, problems)
    return tuple(_strategy(name) for name in names)


def compare(estimator: Estimator, case: Case, strategies: Sequence[Strategy]) -> Iterator[Compared]:
    """Estimates the job under each strategy; all else stays as the job has it."""
    for strategy in strategies:
        yield Compared(strategy=strategy, outcome=estimator.attempt(case, strategy.values))


def _parts(name: str) -> tuple[str, int | None, tuple[str, ...]] | None:
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    tensor = None if match[2] is None else int(match[2])
    suffixes = tuple(re.findall(r"full-offload|offload|no-checkpointing|checkpointing", match[3]))
    offloads = {"offload", "full-offload"} & set(suffixes)
    if any(match[1] not in _STAGES_OF[suffix] for suffix in offloads):
        return None
    both = {"checkpointing", "no-checkpointing"} <= set(suffixes)
    shards = tensor is not None and not match[1].startswith("zero")
    if len(set(suffixes)) < len(suffixes) or len(offloads) > 1 or both or shards:
        return None
    return match[1], tensor, suffixes


def _strategy(name: str) -> Strategy:
    parts = _parts(name)
    assert parts is not None
    base, tensor, suffixes = parts
    values: dict[str, Any] = {
        "parallel.strategy": "zero" if base.startswith("zero") else base,
        "parallel.zero_stage": int(base[-1]) if base.startswith("zero") else None,
        "parallel.offload": "none",
        "parallel.offload_ratio": None,
    }
    if tensor is not None or not base.startswith("zero"):  # DDP and FSDP2 know no tensor ranks
        values["parallel.tensor"] = tensor or 1
        if values["parallel.tensor"] == 1:
            values["parallel.sequence_parallel"] = None
    for suffix in suffixes:
        values |= _SUFFIXES[suffix]
    return Strategy(name=name, values=values)


def _not_built(name: str) -> Problem:
    return Problem(
        code="COMPARE_NOT_BUILT",
        key="--compare",
        message=f"--compare {name}: names of strategies have no pipeline stages",
        fix="Set parallel.pipeline in the job or by --set, which zero1 to zero3 keep; compare zero0 to zero3, these with -tp2 and so on too, "
        "ddp and fsdp2",
    )


def _no_strategy(name: str, *, twice: bool = False) -> Problem:
    return Problem(
        code="COMPARE_STRATEGY",
        key="--compare",
        message=f"--compare {name!r} " + ("is named twice" if twice else "is no strategy"),
        fix="Name zero0 to zero3, ddp or fsdp2, each once; after zero0 to zero3 -tp2 or another number of tensor ranks (else as the job "
        "has it); after all of them -checkpointing or -no-checkpointing (else as the job has it), after zero1 to zero3 -offload, and "
        "after zero3 -full-offload",
    )
