"""The job's `deepspeed` section: every key known, of the right type, and with one home."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from toolkit.deepspeed_spec.schema import HOMES, REMOVED, DeepSpeedKeys, leaf_values, schema_paths
from toolkit.errors import Problem
from toolkit.plan.draft import Draft
from toolkit.spec.suggestions import nearest_key


def known_and_typed(draft: Draft) -> Iterator[Problem]:
    """Each key exists in DeepSpeed, is not set elsewhere, and has DeepSpeed's type."""
    section = draft.job.deepspeed
    if not section:  # most jobs: the schema is built when it is first used
        return
    placed = {path for path in _paths(section) if path in HOMES or path in REMOVED}
    for path in sorted(placed):
        yield _misplaced(path)
    leaves = {path: value for path, value in leaf_values(section) if not _inside(path, placed)}
    autos = {path for path, value in leaves.items() if value == "auto"}
    for path in sorted(autos):
        yield Problem(
            code="DEEPSPEED_AUTO",
            key=f"deepspeed.{path}",
            message=f'deepspeed.{path}="auto": only Trainer resolves "auto"; DeepSpeed drops it for its default, or fails',
            fix="Write the value, or leave the key out",
            source="deepspeed runtime/config_utils.py DeepSpeedConfigModel",
        )
    nulls = {path for path, value in leaves.items() if value is None}
    for path in sorted(nulls):
        yield _invalid(path, "null", "Write a value, or leave the key out", None)
    try:
        DeepSpeedKeys.model_validate(section)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            path = ".".join(str(part) for part in detail["loc"])
            if not _inside(path, placed | autos | nulls):
                yield _invalid(path, detail["type"], detail["msg"], detail["input"])


def _inside(path: str, roots: set[str]) -> bool:
    return any(path == root or path.startswith(f"{root}.") for root in roots)


def _misplaced(path: str) -> Problem:
    if path in REMOVED:
        return Problem(
            code="DEEPSPEED_REMOVED",
            key=f"deepspeed.{path}",
            message=f"deepspeed.{path} was removed from DeepSpeed",
            fix=REMOVED[path],
            source="deepspeed runtime/config.py _reject_removed_config_keys",
        )
    return Problem(
        code="DEEPSPEED_HOME",
        key=f"deepspeed.{path}",
        message=f"deepspeed.{path} has its home elsewhere in the job file",
        fix=f"Set {HOMES[path]}",
    )


def _invalid(path: str, kind: str, message: str, value: Any) -> Problem:
    if kind == "extra_forbidden":
        known = list(schema_paths(DeepSpeedKeys))
        near = nearest_key(path, [*known, *HOMES])
        fix = "Remove it"
        if near:
            fix = f"Set {HOMES[near[0]]}" if near[0] in HOMES else f"Did you mean deepspeed.{near[0]}"
        return Problem(
            code="DEEPSPEED_UNKNOWN",
            key=f"deepspeed.{path}",
            message=f"deepspeed.{path} is not a key that takes effect here: DeepSpeed would ignore or refuse it",
            fix=fix,
            source="deepspeed runtime/config.py",
        )
    return Problem(
        code="DEEPSPEED_VALUE",
        key=f"deepspeed.{path}",
        message=f"deepspeed.{path}={value!r} ({type(value).__name__}) is not valid",
        fix=message,
        source="deepspeed runtime/config.py",
    )


def _paths(section: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in section.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _paths(value, f"{prefix}{key}.")


RULES = (known_and_typed,)
