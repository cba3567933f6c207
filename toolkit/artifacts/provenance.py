"""The origin of each value of each emitted config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from toolkit.artifacts.origins import ACCELERATE, DEEPSPEED, PIPELINE, TRAINER, Origin
from toolkit.planning.plan import Plan
from toolkit.planning.settings import Choice

TABLES: Mapping[str, Mapping[str, Origin]] = {
    "deepspeed.json": DEEPSPEED,
    "deepspeed-trainer.json": DEEPSPEED,
    "deepspeed-accelerate.json": DEEPSPEED,
    "accelerate.yaml": ACCELERATE,
    "training_arguments.json": TRAINER,
}


def leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, value) of every value that is not itself a section; an empty section counts as a value.

    >>> list(leaves({"a": {"b": 1, "c": [2]}, "d": {}}))
    [('a.b', 1), ('a.c', [2]), ('d', {})]
    """
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def provenance(plan: Plan, file: str, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Explain every value of one config.

    Args:
        file: Name of the emitted file, a key of `TABLES`.
        config: Its content.

    Returns:
        Dotted path → `value`, `choices` (choices of the plan that it follows from: key, value, source, reason) and
        `reason` (how it follows, or why it is fixed; empty if the choices suffice).
    """
    by_key: dict[str, list[Choice]] = {}
    for choice in plan.choices:
        by_key.setdefault(choice.key, []).append(choice)
    table = TABLES[file]
    if table is DEEPSPEED and plan.grid.pp > 1:
        table = {**table, **PIPELINE}
    written = dict(leaves(plan.job.deepspeed)) if TABLES[file] is DEEPSPEED else {}
    return {
        path: _verbatim(path, value) if path in written else _explained(value, table[path], by_key)
        for path, value in leaves(config)
    }


def _explained(value: Any, origin: Origin, by_key: Mapping[str, list[Choice]]) -> dict[str, Any]:
    choices = [asdict(choice) for key in origin.choices for choice in by_key.get(key, ())]
    return {"value": value, "choices": choices, "reason": origin.reason}


def _verbatim(path: str, value: Any) -> dict[str, Any]:
    choice = Choice(
        key=f"deepspeed.{path}",
        value=value,
        source="deepspeed",
        reason="set in the job's deepspeed section, which takes precedence",
    )
    return {"value": value, "choices": [asdict(choice)], "reason": ""}
