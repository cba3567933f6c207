"""A DeepSpeed configuration, checked as the run will read it: keys, values, batch, Trainer's arguments, speed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from toolkit.arguments import shown
from toolkit.deepspeed_spec.engine_checks import run_findings
from toolkit.deepspeed_spec.facts import EngineFacts
from toolkit.deepspeed_spec.findings import Finding
from toolkit.deepspeed_spec.nested import auto_paths, has_path, lookup, size_fault, with_value, without
from toolkit.deepspeed_spec.schema import DeepSpeedConfig
from toolkit.deepspeed_spec.user_file import DEFAULT_AUTO, TRAINER_AUTO
from toolkit.deepspeed_spec.validation import Reading, read_config
from toolkit.planning.batch import valid_triples
from toolkit.user_files.engine_view import EngineView
from toolkit.user_files.report import Edit, Found

_BATCH = "deepspeed runtime/config.py _batch_assertion"
_MATCH = "transformers integrations/deepspeed.py trainer_config_finalize"
_PLUGIN = "accelerate utils/dataclasses.py DeepSpeedPlugin"
_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
# Keys of a job in the fixes of its checks, and what a file says in their place.
_OF_A_FILE: Mapping[str, str] = {
    "Set parallel.offload to optimizer-nvme or full-nvme": "Set a device of zero_optimization to nvme",
    "parallel.zero_stage": "zero_optimization.stage",
    "Set train.precision to bf16": "Set bf16.enabled to true",
    "Set train.precision to fp16": "Set fp16.enabled to true",
    "train.gradient_accumulation_dtype": "data_types.grad_accum_dtype",
}
# Keys that switched torch.compile on in earlier versions of DeepSpeed.
_COMPILE = ("compile.backend", "compile.disable", "compile.enabled", "compile.kwargs")


def check_engine(view: EngineView, values: Mapping[str, Any] | None) -> Iterator[Found]:
    """Yield what is wrong with a DeepSpeed configuration.

    Args:
        view: The configuration.
        values: Arguments of Trainer, for the values that it fills in and compares; None without Trainer.
    """
    if fault := size_fault(view.config):
        fix = "Remove the keys that are not DeepSpeed's"
        yield view.found("error", "", f"{view.file.name} {fault}", fix, source=_PLUGIN, code="DEEPSPEED_UNKNOWN")
        return
    if view.reader in ("trainer", "accelerate") and "zero_optimization" not in view.config:
        yield view.found(
            "error",
            "zero_optimization",
            " is missing: Accelerate, and Trainer through it, refuses a configuration without it",
            "Add it, such as {stage: 2}",
            source=_PLUGIN,
            edits=(view.edit("zero_optimization", "set", {"stage": 0}),),
            code="DEEPSPEED_VALUE",
        )
    if view.reader in ("trainer", "accelerate") and isinstance(view.config.get("zero_optimization"), bool):
        message = f"={shown(view.config['zero_optimization'])} is no section: DeepSpeed alone takes that, Accelerate fails on it"
        fix = "Write {stage: 1} in its place, or {stage: 0} for none"
        edits = (view.edit("zero_optimization", "set", {"stage": int(view.config["zero_optimization"])}),)
        yield view.found(
            "error", "zero_optimization", message, fix, source=_PLUGIN, edits=edits, code="DEEPSPEED_VALUE"
        )
    config, unfilled, mismatched = dict(view.config), auto_paths(view.config), list[Found]()
    if values is not None:
        expected = trainer_values(values, num_ranks=view.num_ranks)
        mismatched += _mismatches(view, expected)
        for path in unfilled & expected.keys():
            config = with_value(config, path, expected[path][0])
        # Accelerate adds the section of Trainer's precision (accelerate utils/dataclasses.py set_mixed_precision).
        wanted = next((name for name in ("fp16", "bf16") if values.get(name)), None)
        other = {"fp16": "bf16", "bf16": "fp16"}.get(str(wanted))
        if wanted is not None and wanted not in config and lookup(config, f"{other}.enabled") is not True:
            config[wanted] = {"enabled": True}
    yield from mismatched
    open_paths = _left_open(view, config)
    reading = read_config(without(config, open_paths))
    dtype = _dtype(reading.keys, open_paths)
    facts = EngineFacts.of_config(reading.keys, dtype=dtype)
    for finding in (*reading.findings, *run_findings(reading, facts)):
        yield from _of_finding(view, finding)
    if not mismatched:  # else the sizes are those of two runs
        yield from _batch(view, config, reading)
    yield from _slow(view, reading.keys, dtype=dtype, open_paths=open_paths)


def batch_sizes(view: EngineView, values: Mapping[str, Any] | None) -> tuple[int | None, ...]:
    """Return train batch, micro batch and accumulation as the run will have them; None for each that is open."""
    expected = {} if values is None else trainer_values(values, num_ranks=view.num_ranks)
    sizes = [lookup(view.config, path) for path in _SIZES]
    filled = [
        expected[path][0] if size == "auto" and path in expected else size
        for path, size in zip(_SIZES, sizes, strict=True)
    ]
    return tuple(size if isinstance(size, int) and not isinstance(size, bool) else None for size in filled)


def trainer_values(values: Mapping[str, Any], *, num_ranks: int | None) -> dict[str, tuple[Any, str]]:
    """Return what Trainer fills in and compares, with the argument's name (integrations/deepspeed.py trainer_config_process)."""
    micro, steps = values.get("per_device_train_batch_size"), values.get("gradient_accumulation_steps")
    rate = values.get("learning_rate")
    found = {
        "train_micro_batch_size_per_gpu": (micro, "per_device_train_batch_size"),
        "gradient_accumulation_steps": (steps, "gradient_accumulation_steps"),
        "gradient_clipping": (values.get("max_grad_norm"), "max_grad_norm"),
        "optimizer.params.lr": (rate, "learning_rate"),
        "optimizer.params.betas": ([values.get("adam_beta1"), values.get("adam_beta2")], "adam_beta1, adam_beta2"),
        "optimizer.params.eps": (values.get("adam_epsilon"), "adam_epsilon"),
        "optimizer.params.weight_decay": (values.get("weight_decay"), "weight_decay"),
        "scheduler.params.warmup_max_lr": (rate, "learning_rate"),
    }
    for name in ("fp16", "bf16"):
        if values.get(name, False) is not None:  # else it is there under a wrong name
            found[f"{name}.enabled"] = (bool(values.get(name) or values.get(f"{name}_full_eval")), name)
    if num_ranks is not None and isinstance(micro, int) and isinstance(steps, int):
        found["train_batch_size"] = (num_ranks * micro * steps, "per_device_train_batch_size × accumulation × ranks")
    limit = values.get("max_steps")
    if isinstance(limit, int) and limit > 0:
        warmup = values.get("warmup_steps") or 0
        found["scheduler.params.total_num_steps"] = (limit, "max_steps")
        if isinstance(warmup, int | float):
            steps = max(1, int(warmup) if warmup >= 1 else math.ceil(limit * warmup))
            found["scheduler.params.warmup_num_steps"] = (steps, "warmup_steps")
    return {path: pair for path, pair in found.items() if pair[0] is not None}


def _mismatches(view: EngineView, expected: Mapping[str, tuple[Any, str]]) -> Iterator[Found]:
    """Yield values that differ from Trainer's, which compares them with their types."""
    yield from _indivisible(view, expected)
    for path, (value, name) in expected.items():
        written = lookup(view.config, path)
        if written is None or written == "auto" or written == value:
            continue
        if view.from_accelerate and path in ("fp16.enabled", "bf16.enabled"):
            argument = path.partition(".")[0]
            message = f"={argument} and the argument {argument}={str(value).lower()}"
            fix = f"Set the argument {argument} to true, or mixed_precision to what the arguments say"
            yield view.found("error", path, message, fix, source=_MATCH, code="TRAINER_MISMATCH")
            continue
        action = ("remove",) if view.from_accelerate else ("set", "auto")
        yield view.found(
            "error",
            path,
            f"={_json(written)} and {name}={_json(value)} of Trainer's arguments: Trainer refuses the two",
            "Leave it out"
            if view.from_accelerate
            else 'Write "auto", which Trainer fills in, or the same value in both',
            source=_MATCH,
            edits=(view.edit(path, *action),),
            code="TRAINER_MISMATCH",
        )


def _indivisible(view: EngineView, expected: Mapping[str, tuple[Any, str]]) -> Iterator[Found]:
    """Yield a train batch that no number of ranks makes of Trainer's sizes."""
    written = lookup(view.config, "train_batch_size")
    micro, steps = (expected.get(path, (None, ""))[0] for path in _SIZES[1:])
    sizes = (written, micro, steps)
    if (
        view.num_ranks is not None
        or not all(type(size) is int and size > 0 for size in sizes)
        or not written % (micro * steps)
    ):
        return
    message = (
        f"={written} is no multiple of per_device_train_batch_size={micro} × gradient_accumulation_steps={steps} of "
        "Trainer's arguments: Trainer refuses the two"
    )
    edits = (view.edit("train_batch_size", "set", "auto"),)
    fix = 'Write "auto", which Trainer fills in'
    yield view.found("error", "train_batch_size", message, fix, code="TRAINER_MISMATCH", source=_MATCH, edits=edits)


def _json(value: Any) -> str:
    return json.dumps(value, default=str)


def _left_open(view: EngineView, config: Mapping[str, Any]) -> set[str]:
    """Return the paths that are "auto" and that someone fills in later."""
    autos = auto_paths(config)
    if view.reader == "deepspeed":
        return set()
    plugin = DEFAULT_AUTO | ({"zero_optimization.stage"} if view.reader else set())
    return autos & (TRAINER_AUTO | plugin)


def _dtype(keys: DeepSpeedConfig, open_paths: set[str]) -> str | None:
    if open_paths & {"bf16.enabled", "fp16.enabled"}:
        return None
    return "bf16" if keys.bf16.enabled else "fp16" if keys.fp16.enabled else None


def _of_finding(view: EngineView, finding: Finding) -> Iterator[Found]:
    level = "error" if finding.outcome == "refused" else "warning"
    fix = f"Did you mean {finding.meant}" if finding.meant else finding.fix
    if finding.path in _COMPILE and finding.code == "DEEPSPEED_UNKNOWN":
        fix = (
            "Remove it: DeepSpeed took it out. To compile, write torch_compile: true and torch_compile_backend in Trainer's "
            "arguments, or call engine.compile(backend=...)"
        )
    for job_key, key in _OF_A_FILE.items():
        fix = fix.replace(job_key, key)
    if view.from_accelerate:
        fix = fix.replace("zero_optimization.stage", view.key_of("zero_optimization.stage"))
    edits = tuple(_edits(view, finding))
    if finding.code == "DEEPSPEED_VALUE" and edits and edits[0].action == "set":
        fix = f"Write {json.dumps(edits[0].value)}"
    yield view.found(
        level,  # type: ignore[arg-type]
        finding.path,
        finding.message,
        fix,
        code=finding.code,
        source=finding.source,
        edits=edits,
    )


def _edits(view: EngineView, finding: Finding) -> Iterator[Edit]:
    path, value = finding.path, lookup(view.config, finding.path)
    if view.from_accelerate or not has_path(view.config, path):
        return
    if finding.path in _COMPILE:
        section = view.config["compile"]
        whole = isinstance(section, Mapping) and all(f"compile.{key}" in _COMPILE for key in section)
        yield view.edit("compile" if whole else path, "remove")
    elif finding.code == "DEEPSPEED_UNKNOWN":
        if path.rpartition(".")[2].startswith("_") and finding.outcome == "other":
            return  # a comment, which nobody misses or minds
        yield view.edit(path, "remove")
        if finding.meant and lookup(view.config, finding.meant) is None:
            yield view.edit(finding.meant, "set", value)
    elif finding.code == "DEEPSPEED_AUTO" and path == "zero_optimization.stage":
        if view.reader:
            yield view.edit(path, "set", 2)
    elif finding.code in ("DEEPSPEED_REMOVED", "DEEPSPEED_AUTO", "DEEPSPEED_IGNORED", "DEEPSPEED_PRESCALE"):
        yield view.edit(path, "remove")
    elif finding.code == "DEEPSPEED_VALUE" and finding.outcome == "refused":
        right = _corrected(view.config, path, value)
        if right is not None:
            yield view.edit(path, "set", right)


def _corrected(config: Mapping[str, Any], path: str, value: Any) -> Any:
    """Return the value that a wrong one spells, if DeepSpeed accepts it; None if there is none."""
    candidates: list[Any] = []
    if isinstance(value, str):
        text = value.strip().lower()
        candidates += [{"true": True, "false": False}.get(text), text]
        try:
            number = float(text)
            candidates += [int(number), number] if number.is_integer() else [number]
        except (ValueError, OverflowError):
            pass
    elif isinstance(value, float) and math.isfinite(value):
        candidates.append(round(value))
    for candidate in candidates:
        if candidate is None or candidate == value:
            continue
        reading = read_config(without(with_value(config, path, candidate), auto_paths(config)))
        if not any(each.path == path and each.outcome == "refused" for each in reading.findings):
            return candidate
    return None


def _batch(view: EngineView, config: Mapping[str, Any], reading: Reading) -> Iterator[Found]:
    """Yield sizes that no number of ranks, or not the given one, brings together."""
    keys, ranks = reading.keys, view.num_ranks
    sizes = {name: getattr(keys, name) for name in _SIZES}
    refused = {finding.path for finding in reading.findings if finding.outcome == "refused"}
    if refused.intersection(_SIZES) or any(lookup(config, name) == "auto" for name in _SIZES):
        return
    train, micro, steps = (size if size is None else int(size) for size in sizes.values())
    if train is None and micro is None:
        missing = "train_micro_batch_size_per_gpu"
        what = " and train_batch_size are both missing: DeepSpeed needs one of them"
        fix = 'Write one, or both as "auto" for Trainer and Accelerate'
        edits = (view.edit(missing, "set", "auto"),) if view.reader in ("trainer", "accelerate") else ()
        yield view.found("error", missing, what, fix, source=_BATCH, edits=edits, code="BATCH_EQUATION")
        return
    if train is None:
        return
    if ranks is None:  # for any number of ranks
        ranks = max(1, train // (micro * steps)) if micro and steps else 1
        known = ""
    else:
        known = f", and the run has {ranks} rank{'' if ranks == 1 else 's'}"
    product = (micro or 1) * (steps or 1) * ranks
    solved = train == product if micro and steps else (train % product == 0 and train >= product)
    if solved:
        return
    names = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": steps}
    parts = " × ".join(f"{name}={size}" for name, size in names.items() if size)
    nearest = max(1, round(train / ranks)) * ranks
    triples = ", ".join(f"{each.micro} × {each.accumulation} × {ranks}" for each in valid_triples(nearest, ranks)[:12])
    what = f"={train} is not {parts or 'micro × accumulation'} × ranks{known}"
    if micro and steps:
        what += f": {micro} × {steps} × {ranks} = {product}"
    elif micro and train < micro * ranks:
        what += ": the accumulation would be 0"
    yield view.found(
        "error",
        "train_batch_size",
        what,
        f"Write train_batch_size={nearest} with micro × accumulation × ranks one of {triples}, or leave one of the three out",
        source=_BATCH,
        edits=(view.edit("train_batch_size", "remove"),) if micro else (),
        code="BATCH_EQUATION",
    )


def _slow(view: EngineView, keys: DeepSpeedConfig, *, dtype: str | None, open_paths: set[str]) -> Iterator[Found]:
    """Yield settings with which a run takes longer than it need."""
    zero = keys.zero_optimization
    rows: list[tuple[bool, str, str, str, str]] = [
        (
            keys.wall_clock_breakdown,
            "wall_clock_breakdown",
            "=true waits for the card at every timer of every step",
            "Set it to false once the times are known",
            "deepspeed utils/timer.py SynchronizedWallClockTimer",
        ),
        (
            dtype is None
            and not open_paths & {"bf16.enabled", "fp16.enabled"}
            and view.reader != "accelerate"
            and keys.torch_autocast is None,
            "bf16",
            " is not enabled, nor is fp16: the run computes in fp32, with half the speed and twice the memory or more",
            "Write bf16: true in Trainer's arguments (--bf16) and bf16: {enabled: auto} here, on cards that have it"
            if view.reader == "trainer"
            else "Write bf16: {enabled: true} on cards that have it",
            "deepspeed runtime/config.py DeepSpeedConfig",
        ),
        (
            zero.stage == 3 and zero.prefetch_bucket_size == 0,
            "zero_optimization.stage3_prefetch_bucket_size",
            "=0: no layer is gathered ahead of its use",
            "Leave it out, for the default of 5e7",
            "deepspeed runtime/zero/partitioned_param_coordinator.py",
        ),
        (
            zero.stage == 3 and zero.max_live_parameters == 0,
            "zero_optimization.stage3_max_live_parameters",
            "=0: no layer is gathered ahead of its use",
            "Leave it out, for the default of 1e9",
            "deepspeed runtime/zero/partitioned_param_coordinator.py",
        ),
        (
            zero.stage == 3 and lookup(view.config, "zero_optimization.overlap_comm") is False,
            "zero_optimization.overlap_comm",
            "=false: computing waits for every collective",
            "Set it to true, or leave it out",
            "deepspeed runtime/zero/stage3.py DeepSpeedZeroOptimizer_Stage3",
        ),
        (
            bool(keys.optimizer_params.get("torch_adam")) and zero.offload_optimizer is None,
            "optimizer.params.torch_adam",
            "=true: torch's Adam in place of DeepSpeed's fused one",
            "Remove it where DeepSpeed can build its kernels",
            "deepspeed runtime/engine.py _configure_basic_optimizer",
        ),
    ]
    for part in ("offload_optimizer", "offload_param"):
        section = getattr(zero, part)
        is_off = section is not None and section.device == "cpu" and section.pin_memory is False
        name = f"zero_optimization.{part}.pin_memory"
        what, fix = "=false: copies from pageable memory are slow and overlap with nothing", "Set it to true"
        rows.append((is_off and zero.stage > 0, name, what, fix, "deepspeed runtime/zero/offload_config.py"))
    for applies, path, message, fix, source in rows:
        if applies and (not view.from_accelerate or path == "bf16"):
            yield view.found("note", path, message, fix, source=source, code="SLOWER")
