"""One job under several strategies: ZeRO stages, tensor ranks, pipelines, DDP and FSDP2, with and without offload and checkpointing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from toolkit.errors import Problem, SpecError, raise_all
from toolkit.memory.scenario import Outcome, Scenario

if TYPE_CHECKING:
    from toolkit.config.job import Job
    from toolkit.memory.search.estimator import Estimator
    from toolkit.planning.plan import Plan

_NAME = re.compile(
    r"(?:(?P<base>zero[0-3]|ddp|fsdp2)(?P<axes>(?:-(?:tp|pp)[1-9]\d*){0,2})|(?P<stages>pp[1-9]\d*))"
    r"(?P<suffixes>(?:-(?:offload|full-offload|no-checkpointing|checkpointing))*)"
)

# Keys that a suffix sets.
_SUFFIXES: dict[str, dict[str, Any]] = {
    "offload": {"parallel.offload": "optimizer-cpu"},
    "full-offload": {"parallel.offload": "full-cpu"},
    "checkpointing": {"train.gradient_checkpointing": True},
    "no-checkpointing": {"train.gradient_checkpointing": False},
}
# Stages that have the partitions which an offload moves (planning/offload.py PROFILES).
_STAGES_OF = {"offload": ("zero1", "zero2", "zero3"), "full-offload": ("zero3",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A named strategy.

    Args:
        values: Values by dotted key of the job.
    """

    name: str
    values: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A strategy and its outcome.

    Args:
        full_name: Name with the job's ZeRO stage, tensor ranks and pipeline stages where the strategy leaves them open.
    """

    strategy: Strategy
    full_name: str
    outcome: Outcome


def read_strategies(text: str) -> tuple[Strategy, ...]:
    """Read `zero2,zero3-offload,…`.

    Raises:
        SpecError: COMPARE_STRATEGY for each name that is not one.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise SpecError(_no_strategy(text))
    problems = [_no_strategy(name) for name in names if _parts(name) is None]
    problems += [_no_strategy(name, twice=True) for name in dict.fromkeys(names) if names.count(name) > 1]
    raise_all(SpecError, problems)
    return tuple(_strategy(name) for name in names)


def compare(estimator: Estimator, case: Scenario, strategies: Sequence[Strategy]) -> Iterator[Compared]:
    """Estimate the job under each strategy, with all other values of the job unchanged."""
    for strategy in strategies:
        values = dict(strategy.values)
        for other in ("ddp", "fsdp2"):  # options of a strategy go with it
            if getattr(case.job.parallel, other) is not None and values.get("parallel.strategy", other) != other:
                values[f"parallel.{other}"] = None
        parallel = case.job.parallel
        if (
            isinstance(parallel.partition, tuple)
            and values.get("parallel.pipeline", parallel.pipeline) != parallel.pipeline
        ):
            values["parallel.partition"] = None  # it lists the layers for another number of stages
        outcome = estimator.attempt(case, values)
        if outcome.problems:
            problems = tuple(_with_remedy(problem, strategy.name, case) for problem in outcome.problems)
            outcome = replace(outcome, problems=problems)
        yield Compared(strategy=strategy, full_name=full_name(strategy.name, case.job, case.plan()), outcome=outcome)


def full_name(name: str, job: Job, plan: Plan) -> str:
    """Complete a strategy's name by what it leaves to the job: `zero3-tp2-pp2` for `zero3` where the job has both."""
    parts = _parts(name)
    assert parts is not None
    if parts.base in ("ddp", "fsdp2"):
        return name
    tensor, pipeline = (parts.tensor or job.parallel.tensor), (parts.pipeline or job.parallel.pipeline)
    if parts.base is None and tensor == 1:
        return name
    base = parts.base or f"zero{plan.settings.zero_stage}"
    return _named(base, tensor=tensor, pipeline=pipeline, suffixes=parts.suffixes)


def _named(base: str, *, tensor: int, pipeline: int, suffixes: Sequence[str], at_least: int = 2) -> str:
    axes = [f"{axis}{size}" for axis, size in (("tp", tensor), ("pp", pipeline)) if size >= at_least]
    return "-".join((base, *axes, *suffixes))


def _with_remedy(problem: Problem, name: str, case: Scenario) -> Problem:
    """Return the problem, with a name for the strategy without the job's other axis where both do not fit its cards."""
    parts, parallel = _parts(name), case.job.parallel
    assert parts is not None
    kept = [
        f"{key}={size}"
        for key, given, size in (
            ("tensor", parts.tensor, parallel.tensor),
            ("pipeline", parts.pipeline, parallel.pipeline),
        )
        if given is None and size > 1
    ]
    if problem.code != "GRID_WORLD" or not kept:
        return problem
    base = parts.base or f"zero{case.plan().settings.zero_stage}"
    alone = _named(base, tensor=parts.tensor or 1, pipeline=parts.pipeline or 1, suffixes=parts.suffixes, at_least=1)
    return replace(problem, fix=f"{name} keeps the job's {' and '.join(kept)}: name {alone} for a strategy without")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """The parts of a strategy's name; None where it leaves a size to the job."""

    base: str | None
    tensor: int | None
    pipeline: int | None
    suffixes: tuple[str, ...]


def _parts(name: str) -> _Parts | None:
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    base, axes = match["base"], re.findall(r"(tp|pp)(\d+)", match["axes"] or match["stages"] or "")
    sizes = {axis: int(size) for axis, size in axes}
    suffixes = tuple(re.findall(r"full-offload|offload|no-checkpointing|checkpointing", match["suffixes"]))
    offloads = {"offload", "full-offload"} & set(suffixes)
    if any(base not in _STAGES_OF[suffix] for suffix in offloads):
        return None
    both = {"checkpointing", "no-checkpointing"} <= set(suffixes)
    cuts = sizes and base in ("ddp", "fsdp2")
    if len(set(suffixes)) < len(suffixes) or len(sizes) < len(axes) or len(offloads) > 1 or both or cuts:
        return None
    return _Parts(base=base, tensor=sizes.get("tp"), pipeline=sizes.get("pp"), suffixes=suffixes)


def _strategy(name: str) -> Strategy:
    parts = _parts(name)
    assert parts is not None
    base = parts.base
    values: dict[str, Any] = {"parallel.offload": "none", "parallel.offload_ratio": None}
    if base is not None:
        values["parallel.strategy"] = "zero" if base.startswith("zero") else base
        values["parallel.zero_stage"] = int(base[-1]) if base.startswith("zero") else None
    whole = base in ("ddp", "fsdp2")  # they have neither tensor ranks nor pipeline stages
    if parts.tensor is not None or whole:
        values["parallel.tensor"] = parts.tensor or 1
        if values["parallel.tensor"] == 1:
            values |= {"parallel.sequence_parallel": None, "parallel.experts": None}
    if parts.pipeline is not None or whole:
        values["parallel.pipeline"] = parts.pipeline or 1
        if values["parallel.pipeline"] == 1:
            values |= dict.fromkeys(f"parallel.{key}" for key in ("pipeline_schedule", "virtual_stages", "partition"))
    for suffix in parts.suffixes:
        values |= _SUFFIXES[suffix]
    return Strategy(name=name, values=values)


def _no_strategy(name: str, *, twice: bool = False) -> Problem:
    return Problem(
        code="COMPARE_STRATEGY",
        key="--compare",
        message=f"--compare {name!r} " + ("is named twice" if twice else "is not a strategy"),
        fix="Name zero0 to zero3, ddp, fsdp2 or pp2 (or another number of stages), each once; after zero0 to zero3 -tp2 or another number "
        "of tensor ranks and -pp2 or another number of stages (else as the job has them, 1 for none); after all of them -checkpointing or -no-checkpointing (else as the job has it), after zero1 to zero3 -offload, and "
        "after zero3 -full-offload",
    )
