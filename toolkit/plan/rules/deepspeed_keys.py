"""The job's `deepspeed` section: every key known, of the right type, with one home, and of effect."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from toolkit.errors import Problem
from toolkit.plan.deepspeed_schema import HOMES, REMOVED, DeepSpeedKeys
from toolkit.plan.draft import Draft


def known_and_typed(draft: Draft) -> Iterator[Problem]:
    """Each key exists in DeepSpeed, is not set elsewhere, and has DeepSpeed's type."""
    section = draft.job.deepspeed
    placed = {path for path in _paths(section) if path in HOMES or path in REMOVED}
    for path in sorted(placed):
        yield _misplaced(path)
    autos = {path for path, value in _leaves(section) if value == "auto"}
    for path in sorted(autos):
        yield Problem(
            code="DEEPSPEED_AUTO",
            key=f"deepspeed.{path}",
            message=f'deepspeed.{path}="auto": only Trainer resolves "auto"; DeepSpeed drops it for its default, or fails',
            fix="Write the value, or leave the key out",
            source="deepspeed runtime/config_utils.py DeepSpeedConfigModel",
        )
    try:
        DeepSpeedKeys.model_validate(section)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            path = ".".join(str(part) for part in detail["loc"])
            if not any(path == known or path.startswith(f"{known}.") for known in placed | autos):
                yield _invalid(path, detail["type"], detail["msg"], detail["input"])


def of_effect(draft: Draft) -> Iterator[Problem]:
    """Keys that the ZeRO stage, the precision or the offload profile would ignore."""
    section, stage = draft.job.deepspeed, draft.settings.zero_stage
    zero = section.get("zero_optimization")
    if isinstance(zero, Mapping):
        for key in zero:
            needed = _needed_stage(key)
            if stage < needed and f"zero_optimization.{key}" not in HOMES:
                yield _ignored(
                    f"zero_optimization.{key}", f"zero_stage={stage}", f"Set parallel.zero_stage to {needed}"
                )
        for key, device in (
            ("offload_optimizer", draft.profile.optimizer),
            ("offload_param", draft.profile.parameters),
        ):
            if key in zero and device is None:
                yield _ignored(
                    f"zero_optimization.{key}", f"offload={draft.profile.name}", "Choose a parallel.offload profile"
                )
    for precision in ("fp16", "bf16"):
        if precision in section and draft.settings.precision != precision:
            yield _ignored(precision, f"precision={draft.settings.precision}", f"Set train.precision to {precision}")
    if "aio" in section and not draft.profile.needs_nvme:
        yield _ignored("aio", f"offload={draft.profile.name}", "Set parallel.offload to optimizer-nvme or full-nvme")


def scaled_reduction(draft: Draft) -> Iterator[Problem]:
    """Prescaling and predivision need all-reduce (stage_1_and_2.py and stage3.py assert it)."""
    section = draft.job.deepspeed
    zero = section.get("zero_optimization")
    scatter = zero.get("reduce_scatter", True) if isinstance(zero, Mapping) else True
    scaled = bool(section.get("prescale_gradients")) or section.get("gradient_predivide_factor", 1.0) != 1.0
    if scaled and scatter and draft.settings.zero_stage > 0:
        yield Problem(
            code="DEEPSPEED_PRESCALE",
            key="deepspeed.prescale_gradients",
            message="prescale_gradients or gradient_predivide_factor with reduce_scatter=true is not supported",
            fix="Set deepspeed.zero_optimization.reduce_scatter to false, or remove them",
            source="deepspeed runtime/zero/stage_1_and_2.py",
        )


def _needed_stage(key: str) -> int:
    if key.startswith(("stage3_", "zero_hpz", "zero_quantized", "offload_param")) or key in (
        "sub_group_size",
        "memory_efficient_linear",
        "log_trace_cache_warnings",
        "enable_sanity_checks",
    ):
        return 3
    return 1


def _ignored(path: str, because: str, fix: str) -> Problem:
    return Problem(
        code="DEEPSPEED_IGNORED",
        key=f"deepspeed.{path}",
        message=f"deepspeed.{path} has no effect with {because}",
        fix=f"{fix}, or remove it",
    )


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
        known = list(_schema_paths(DeepSpeedKeys))
        near = difflib.get_close_matches(path, [*known, *HOMES], n=1)
        return Problem(
            code="DEEPSPEED_UNKNOWN",
            key=f"deepspeed.{path}",
            message=f"deepspeed.{path} is not a key that takes effect here: DeepSpeed would ignore or refuse it",
            fix=f"Did you mean {near[0]}" if near else "Remove it",
            source="deepspeed runtime/config.py",
        )
    return Problem(
        code="DEEPSPEED_VALUE",
        key=f"deepspeed.{path}",
        message=f"deepspeed.{path}={value!r} ({type(value).__name__}) is not valid",
        fix=message,
        source="deepspeed runtime/config.py",
    )


def _schema_paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        for member in getattr(field.annotation, "__args__", ()):
            if isinstance(member, type) and issubclass(member, BaseModel):
                yield from _schema_paths(member, f"{prefix}{name}.")


def _paths(section: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in section.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _paths(value, f"{prefix}{key}.")


def _leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


RULES = (known_and_typed, of_effect, scaled_reduction)
