"""The fastest settings for the cluster that a job names: chosen once, and remembered by all that they depend on."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.artifacts.record_cache import RecordCache
from toolkit.artifacts.records import Records
from toolkit.errors import ToolkitError, first_line
from toolkit.launch.user_cache import user_cache_folder, user_config_folder
from toolkit.memory.search.stored import OF_THE_RUN, versions
from toolkit.planner.lines import describe_kernels
from toolkit.planner.make import ask, search
from toolkit.planner.options import Found, Option, fastest, setting_of
from toolkit.planner.question import CHOSEN_KEYS
from toolkit.planning.resolve import resolve_with
from toolkit.units import format_bytes

if TYPE_CHECKING:
    from toolkit.memory.search.estimator import Estimator
    from toolkit.planning.plan import Plan

# Gain below which the fixed defaults are kept.
_LEAST_GAIN = 1.03
# Axes of the grid: they change what a checkpoint looks like, and are left to the user.
_LEFT_ALONE = ("parallel.tensor", "parallel.pipeline")
# With these a step rounds otherwise: a run that is resumed keeps them on any ranks.
_OF_ARITHMETIC = frozenset({"train.loss", "train.kernels", "train.torch_compile"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What a search found, as data.

    Args:
        line: The line to print.
        values: What was chosen, by key of the job, as JSON.
        reason: Why.
        failed: Whether it ended with an error, after which another may succeed.
    """

    line: str
    values: str = "{}"
    reason: str = ""
    failed: bool = False


_FOUND: Records[_Found] = Records(_Found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A plan with the settings that were chosen for its cluster.

    Args:
        plan: The plan.
        values: What was chosen in place of the fixed defaults, by key of the job.
        line: What was chosen, what it gains and how to pin it, on one line.
    """

    plan: Plan
    values: Mapping[str, Any]
    line: str


def choose(plan: Plan, *, estimator: Estimator | None = None, folder: Path | None = None) -> Chosen:
    """Choose the fastest settings for what a plan's job leaves open; what the job says is kept.

    Args:
        plan: Plan with the fixed defaults.
        estimator: Makes exact estimates.
        folder: Folder in which choices are remembered; that of the user's caches when left out.
    """
    kept = folder or _user_folder()
    cache = None if kept is None else RecordCache(kept)
    key = _key(plan)
    known = None if cache is None else cache.get(key, _FOUND)
    values = None if known is None else _read_values(known)
    if known is None or values is None:
        known = _search(plan, estimator)
        values = _read_values(known) or {}
        if not known.failed and cache is not None:
            cache.put(key, known, _FOUND)
    try:
        return Chosen(plan=with_choices(plan, values, known.reason) if values else plan, values=values, line=known.line)
    except ToolkitError as error:
        return Chosen(plan=plan, values={}, line=f"the fixed defaults are taken: {error.problems[0]}")


def is_of_same_ranks(plan: Plan, saved: Plan) -> bool:
    """Return whether a checkpoint's plan is for as many ranks, with the same tensor and pipeline sizes."""
    return saved.job.cluster.num_ranks == plan.job.cluster.num_ranks and saved.grid == plan.grid


def follow(plan: Plan, saved: Plan) -> Plan:
    """Return the plan with the settings of a checkpoint's plan for what its job leaves open; of other ranks, those of the arithmetic."""
    wanted = setting_of(saved).values()
    if not is_of_same_ranks(plan, saved):
        wanted = {key: value for key, value in wanted.items() if key in _OF_ARITHMETIC}
    values = _changes(plan, wanted)
    try:
        return with_choices(plan, values, "that of the checkpoint") if values else plan
    except ToolkitError:
        return plan  # `resume_point` reports what a checkpoint does not allow


def with_choices(plan: Plan, values: Mapping[str, Any], reason: str) -> Plan:
    """Return the plan of its job with chosen values, each recorded as the planner's with a reason.

    Raises:
        PlanError: The values are not valid together.
    """
    made = resolve_with(plan.job.with_(values), model=plan.model, gpu=plan.gpu)
    choices = tuple(
        replace(choice, source="planner", reason=reason) if choice.key in values else choice for choice in made.choices
    )
    return replace(made, choices=choices)


def builds_kernels() -> bool:
    """Return whether this machine can build the kernels of compiled layers and of Liger.

    Source:
        triton/runtime/build.py: it needs the compiler that CC names, gcc or clang.
    """
    return find_spec("triton") is not None and any(map(shutil.which, (os.environ.get("CC") or "gcc", "gcc", "clang")))


def _user_folder() -> Path | None:
    cache = user_cache_folder()
    return None if cache is None else cache / "plans"


def _search(plan: Plan, estimator: Estimator | None) -> _Found:
    """Return what a search found."""
    pinned = {key: getattr(plan.job.parallel, key.rpartition(".")[2]) for key in _LEFT_ALONE}
    compiles = builds_kernels()
    if not compiles and "torch_compile" not in plan.job.train.model_fields_set:
        pinned["train.torch_compile"] = False
    try:
        question = ask(plan.job.with_(pinned), liger=None if compiles else False)
        found = search(question, estimator=estimator)
    except ToolkitError as error:
        return _Found(line=f"the fixed defaults are taken: {error.problems[0]}")
    except Exception as error:  # a search is a help: what it cannot do must not keep a job from running
        told = f"the search failed with {type(error).__name__}: {first_line(error)}"
        return _Found(line=f"the fixed defaults are taken: {told}", failed=True)
    if not found.options:
        return _Found(line=_nothing_fits(found))
    best = fastest(found.options)
    usual = next((option for option in found.options if option.is_default), None)
    gain = None if usual is None else usual.hours / best.hours
    values = _changes(plan, setting_of(best.plan).values())
    if not values or (gain is not None and gain < _LEAST_GAIN):
        return _Found(line=_kept(best if usual is None else usual))
    over = "the fixed defaults do not fit" if gain is None else f"foreseen {gain:.2f} × as fast as the fixed defaults"
    line = _line(best, over) + (
        "" if compiles else "; with triton and a C compiler (gcc or clang) there might be faster ones"
    )
    return _Found(values=json.dumps(values), reason=f"the fastest that fits these cards: {over}", line=line)


def _line(best: Option, over: str) -> str:
    batch = best.plan.settings.batch
    offload = "" if best.setting.offload == "none" else f", {best.setting.offload}"
    return (
        f"chosen for these cards: micro-batch {batch.micro} × {batch.accumulation}, {best.plan.strategy_name}{offload}, "
        f"{describe_kernels(best.setting)}: {over} ({best.tokens_per_second:,.0f} tokens/s); `toolkit plan JOB --write FILE` pins "
        "it, --as-is takes the defaults"
    )


def _kept(option: Option) -> str:
    return (
        f"the fixed defaults are taken: of {describe_kernels(option.setting)} and its alternatives none is foreseen to be faster "
        f"({option.tokens_per_second:,.0f} tokens/s)"
    )


def _nothing_fits(found: Found) -> str:
    lacks = f": the nearest lacks {format_bytes(found.nearly[0].lacking_bytes)} a card" if found.nearly else ""
    return f"the fixed defaults are taken, but no settings are foreseen to fit{lacks}; `toolkit estimate` shows what would save most"


def _changes(plan: Plan, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that differ from a plan's own, of keys that its job leaves open."""
    own, job = setting_of(plan).values(), plan.job
    found = {}
    for key in CHOSEN_KEYS:
        section, _, name = key.partition(".")
        part = getattr(job, section)
        is_open = name not in part.model_fields_set or getattr(part, name) is None
        if key in wanted and is_open and wanted[key] != own.get(key):
            found[key] = wanted[key]
    batch = ("train.per_device_train_batch_size", "train.gradient_accumulation_steps")
    if any(key in found for key in batch) and job.train.train_batch_size is None:
        found["train.train_batch_size"] = plan.settings.batch.train
        found.pop("train.gradient_accumulation_steps", None)  # it follows
    return found


def _key(plan: Plan) -> str:
    """Return a digest of all that a choice depends on: job, model, card, versions, and figures measured on this machine."""
    job = plan.job.model_dump(mode="json", exclude_unset=True, exclude={"data": True})
    for name in OF_THE_RUN:
        job.get("train", {}).pop(name, None)
    data = plan.job.data
    known = {
        "job": job,
        "packing": None if data is None else plan.packing,
        "evaluates": plan.settings.eval_steps is not None,
        "model": plan.model.to_dict(),
        "images": repr(plan.image_inputs),  # by the processor's file in the model's folder
        "gpu": plan.gpu.model_dump(mode="json"),
        "versions": versions(),
        "builds_kernels": builds_kernels(),
        "calibration": _calibration(),
    }
    return hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _calibration() -> str:
    texts = []
    for path in sorted(user_config_folder().glob("*.json")):
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError):
            continue
    return hashlib.sha256("".join(texts).encode()).hexdigest()


def _read_values(found: _Found) -> dict[str, Any] | None:
    """Return the values that were chosen; None where they are not those of a choice."""
    try:
        values = json.loads(found.values)
    except ValueError:
        return None
    known = {*CHOSEN_KEYS, "train.train_batch_size"}
    return values if isinstance(values, dict) and set(values) <= known else None
