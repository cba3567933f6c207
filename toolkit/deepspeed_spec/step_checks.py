"""Values of the optimizer, the schedule, the clipping and the loss scale that DeepSpeed's parser passes on unread.

Source: deepspeed 0.19.8 runtime/engine.py _configure_basic_optimizer, get_optimizer_configuration, _scheduler_from_config.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from toolkit.arguments import shown
from toolkit.config.suggestions import nearest
from toolkit.deepspeed_spec.facts import EngineFacts
from toolkit.deepspeed_spec.fields import is_auto
from toolkit.deepspeed_spec.findings import Finding, ineffective, refused
from toolkit.deepspeed_spec.schema import DeepSpeedConfig

_OPTIMIZER = "deepspeed runtime/engine.py _configure_basic_optimizer"
_SCHEDULE = "deepspeed runtime/engine.py _scheduler_from_config"

_ADAM = frozenset({"lr", "betas", "eps", "weight_decay", "amsgrad"})
_LION = frozenset({"lr", "betas", "weight_decay"})
# Parameters that the engine itself takes out, for each of its kinds of Adam.
_OF_ENGINE = frozenset({"torch_adam", "adam_w_mode", "fp32_optimizer_states"})
# By class of optimizer: the names of its arguments.
ARGUMENTS: Mapping[str, frozenset[str]] = {
    "FusedAdam": _ADAM | {"bias_correction", "set_grad_none"},
    "DeepSpeedCPUAdam": _ADAM | {"bias_correction"},
    "torch.optim.Adam": _ADAM | {"maximize", "foreach", "capturable", "differentiable", "fused"},
    "FusedLion": _LION | {"set_grad_none"},
    "DeepSpeedCPULion": _LION | {"fp32_optimizer_states"},
    "torch.optim.SGD": frozenset(
        {"lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize", "foreach", "differentiable", "fused"}
    ),
}
_SWITCHES = _OF_ENGINE | {"amsgrad", "bias_correction", "set_grad_none", "nesterov", "maximize", "foreach", "fused"}
_AMOUNTS = ("lr", "eps", "weight_decay", "momentum")

_WARMUP = frozenset({"warmup_num_steps", "warmup_type", "last_batch_iteration"})
_RATES = frozenset({"warmup_min_lr", "warmup_max_lr"})
# By class of runtime/lr_schedules.py: the names of its arguments.
SCHEDULES: Mapping[str, frozenset[str]] = {
    "LRRangeTest": frozenset(
        {
            *(f"lr_range_test_{name}" for name in ("min_lr", "step_size", "step_rate", "staircase")),
            "last_batch_iteration",
        }
    ),
    "OneCycle": frozenset(
        {
            *("cycle_min_lr", "cycle_max_lr", "decay_lr_rate", "cycle_first_step_size", "cycle_second_step_size"),
            *("cycle_first_stair_count", "cycle_second_stair_count", "decay_step_size", "cycle_momentum"),
            *("cycle_min_mom", "cycle_max_mom", "decay_mom_rate", "last_batch_iteration"),
        }
    ),
    "WarmupLR": _WARMUP | _RATES,
    "WarmupDecayLR": _WARMUP | _RATES | {"total_num_steps"},
    "WarmupCosineLR": _WARMUP | {"total_num_steps", "warmup_min_ratio", "cos_min_ratio"},
}
# Schedules of torch.optim.lr_scheduler, which DeepSpeed takes too; torch itself checks their arguments.
TORCH_SCHEDULES = frozenset(
    {
        *("LambdaLR", "MultiplicativeLR", "StepLR", "MultiStepLR", "ConstantLR", "LinearLR", "ExponentialLR"),
        *("SequentialLR", "PolynomialLR", "CosineAnnealingLR", "ChainedScheduler", "ReduceLROnPlateau", "CyclicLR"),
        *("CosineAnnealingWarmRestarts", "OneCycleLR"),
    }
)
_WARMUP_TYPES = ("log", "linear")

# From 2**64 on torch cannot multiply a loss by the scale: it is a whole number of Python.
_LARGEST_POWER = 63


def clipping(keys: DeepSpeedConfig, facts: EngineFacts) -> Iterator[Finding]:
    """Find a norm to clip by with which DeepSpeed does not clip: it asks whether the value is above 0."""
    value = keys.gradient_clipping
    if not 0 <= value < math.inf:
        yield Finding(
            code="DEEPSPEED_VALUE",
            path="gradient_clipping",
            message=f"={shown(value)}, with which DeepSpeed does not clip",
            fix="Write 0, or the norm to clip by",
            outcome="other",
            source="deepspeed runtime/zero/stage_1_and_2.py unscale_and_clip_grads",
        )


def loss_scale(keys: DeepSpeedConfig, facts: EngineFacts) -> Iterator[Finding]:
    """Find an initial loss scale by which torch cannot multiply."""
    power = keys.fp16.initial_scale_power
    used = keys.fp16.enabled or facts.dtype in ("fp16", None)
    if used and not keys.fp16.loss_scale and power > _LARGEST_POWER:
        yield refused(
            "fp16.initial_scale_power",
            f"={shown(power)}: torch cannot multiply a loss by 2**{shown(power)}",
            f"Set it to 16, which is the default, or to {_LARGEST_POWER} at most",
            source="deepspeed runtime/fp16/loss_scaler.py LossScalerBase",
        )


def optimizer(keys: DeepSpeedConfig, facts: EngineFacts) -> Iterator[Finding]:
    """Find parameters that the optimizer's class does not take, and values with which it cannot step."""
    name = _class_of(keys, facts)
    if name is None:
        return
    known = ARGUMENTS[name] | (_OF_ENGINE if "Adam" in name else frozenset())
    for key, value in keys.optimizer_params.items():
        path = f"optimizer.params.{key}"
        if key == "max_grad_norm" or is_auto(
            value
        ):  # which has a check of its own; which Trainer fills in, or is told of
            continue
        if key not in known:
            yield _unknown(path, str(key), name, known, source=_OPTIMIZER)
        elif key == "betas" and not _are_betas(value):
            what = f"={shown(value)}: Adam and Lion keep two averages, each with a share below 1"
            yield refused(path, what, "Write two numbers from 0 to below 1, such as [0.9, 0.999]", source=_OPTIMIZER)
        elif key in _AMOUNTS and not _is_amount(value):
            yield refused(path, f"={shown(value)} is not valid", "Write a number of at least 0", source=_OPTIMIZER)
        elif key == "amsgrad" and value and name == "FusedAdam":
            yield refused(
                path, "=true: FusedAdam has no such variant", "Remove it, or set torch_adam", source=_OPTIMIZER
            )
        elif key in _SWITCHES and isinstance(value, str):
            yield Finding(
                code="DEEPSPEED_VALUE",
                path=path,
                message=f"={shown(value)} (str), which DeepSpeed reads as {str(bool(value)).lower()}",
                fix="Write true or false",
                outcome="other",
                source=_OPTIMIZER,
            )
        elif key == "adam_w_mode" and not value and str(keys.optimizer and keys.optimizer.type).lower() == "adamw":
            yield ineffective(
                path, "optimizer.type=AdamW", "Set optimizer.type to Adam", value="=false", source=_OPTIMIZER
            )


def _class_of(keys: DeepSpeedConfig, facts: EngineFacts) -> str | None:
    """Return the class of the optimizer that DeepSpeed builds; None without one, and for one that is not known here."""
    name = "" if keys.optimizer is None else str(keys.optimizer.type)
    offloaded = facts.optimizer_device is not None
    if name == "SGD":
        return "torch.optim.SGD"
    if name.lower() == "lion":
        return "DeepSpeedCPULion" if offloaded else "FusedLion"
    if name.lower() not in ("adam", "adamw"):
        return None
    if keys.optimizer_params.get("torch_adam"):
        return "torch.optim.Adam"
    return "DeepSpeedCPUAdam" if offloaded else "FusedAdam"


def _are_betas(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(_is_amount(beta) and beta < 1 for beta in value)


def _is_amount(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value < math.inf


def schedule(keys: DeepSpeedConfig, facts: EngineFacts) -> Iterator[Finding]:
    """Find a schedule that neither DeepSpeed nor torch has, and arguments that it does not take."""
    section = keys.scheduler
    if section is None or section.type is None:
        return
    if section.type not in SCHEDULES and section.type not in TORCH_SCHEDULES:
        near = nearest(section.type, [*SCHEDULES, *TORCH_SCHEDULES])
        fix = f"Did you mean {near[0]}" if near else f"Write one of {', '.join(SCHEDULES)}, or one of torch's"
        yield refused(
            "scheduler.type", f"={shown(section.type)} is not a schedule of DeepSpeed or torch", fix, source=_SCHEDULE
        )
        return
    if "params" not in section.model_fields_set:
        what = f" is left out with scheduler.type={section.type}: DeepSpeed passes it on as null and fails"
        yield refused("scheduler.params", what, "Write it, {} for the schedule's defaults", source=_SCHEDULE)
    if section.type in TORCH_SCHEDULES:
        return
    known = SCHEDULES[section.type]
    for key, value in section.params.items():
        path = f"scheduler.params.{key}"
        if key not in known:
            yield _unknown(path, str(key), section.type, known, source=_SCHEDULE)
        elif key == "warmup_num_steps" and not is_auto(value) and not (isinstance(value, int) and value > 0):
            yield refused(path, f"={shown(value)} is not valid", "Write a whole number above 0", source=_SCHEDULE)
        elif key == "warmup_type" and value not in _WARMUP_TYPES:
            yield Finding(
                code="DEEPSPEED_VALUE",
                path=path,
                message=f"={shown(value)}, instead of which DeepSpeed uses log",
                fix="Write log or linear",
                outcome="other",
                source="deepspeed runtime/lr_schedules.py WarmupLR",
            )


def _unknown(path: str, key: str, owner: str, known: Collection[str], *, source: str) -> Finding:
    near = nearest(key, known)
    fix = f"Did you mean {near[0]}" if near else f"Remove it; {owner} takes {', '.join(sorted(known))}"
    return refused(path, f" is no argument of {owner}", fix, source=source)


STEP_CHECKS = (clipping, loss_scale, optimizer, schedule)
