"""DeepSpeed's learning-rate schedules as those of transformers with the same shape.

Source: deepspeed 0.19.8 runtime/lr_schedules.py WarmupLR, WarmupDecayLR, WarmupCosineLR; transformers optimization.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from toolkit.deepspeed_spec.fields import is_auto
from toolkit.migration.reading import Reading, as_number

_SHAPES: Mapping[str, str] = {
    "WarmupLR": "constant_with_warmup",
    "WarmupDecayLR": "linear",
    "WarmupCosineLR": "cosine_with_min_lr",
}
_PARAMS = "scheduler.params"
# DeepSpeed's defaults: rate of WarmupDecayLR's peak, optimizer steps of the warm-up, share at which its cosine ends.
_PEAK, _WARMUP, _END = 1e-3, 1000, 1e-4
_LOGARITHM = "the warm-up is a line; DeepSpeed's is a logarithm unless warmup_type is linear"


def sets_peak(r: Reading) -> bool:
    """Return whether the schedule sets the peak of the learning rate, whatever the optimizer's is."""
    kind = r.value("scheduler.type")
    given = as_number(r.value(f"{_PARAMS}.warmup_max_lr")) is not None
    return given or (kind == "WarmupDecayLR" and not is_auto(r.value(f"{_PARAMS}.warmup_max_lr")))


def schedule(r: Reading) -> None:
    """Read DeepSpeed's schedule; without one the rate is constant, unless a trainer has one."""
    kind, mine = r.value("scheduler.type"), [key for key in r.leaves if key.startswith("scheduler.")]
    if kind is None:
        if not r.together.trainer and not mine:
            r.carry("train.lr_scheduler_type", "constant", note="DeepSpeed has no schedule where its file has none")
        return
    begins = ("warmup_min_lr", "warmup_min_ratio")
    if str(kind) not in _SHAPES or any(as_number(r.value(f"{_PARAMS}.{key}")) for key in begins):
        fix = "train.lr_scheduler_type may be constant_with_warmup, linear, cosine or cosine_with_min_lr, whose warm-up begins at 0"
        r.refuse(f"a job has no schedule {kind} of that kind", *mine, fix=fix)
        return
    _shape(r, str(kind))
    _peak(r, str(kind))
    total = r.number(f"{_PARAMS}.total_num_steps")
    if total is not None and total > 0:
        r.carry("train.max_steps", int(total), f"{_PARAMS}.total_num_steps")
    r.unneeded(
        "the warm-up begins at 0",
        *(f"{_PARAMS}.{key}" for key in begins if as_number(r.value(f"{_PARAMS}.{key}")) == 0),
    )
    r.unneeded("the schedule says it", f"{_PARAMS}.warmup_type")
    r.refuse(
        "a job has no such option of its schedules",
        *(key for key in mine if key not in r.entries and not is_auto(r.value(key))),
    )


def _shape(r: Reading, kind: str) -> None:
    note = "" if r.value(f"{_PARAMS}.warmup_type") == "linear" else _LOGARITHM
    end = as_number(r.value(f"{_PARAMS}.cos_min_ratio"))
    if kind == "WarmupCosineLR" and end != 0:
        r.carry("train.lr_scheduler_type", _SHAPES[kind], "scheduler.type", note=note)
        r.carry("train.min_learning_rate_ratio", _END if end is None else end, f"{_PARAMS}.cos_min_ratio")
    elif kind == "WarmupCosineLR":
        r.carry("train.lr_scheduler_type", "cosine", "scheduler.type", f"{_PARAMS}.cos_min_ratio", note=note)
    else:
        r.carry("train.lr_scheduler_type", _SHAPES[kind], "scheduler.type", note=note)
    steps = r.number(f"{_PARAMS}.warmup_num_steps")
    if steps is not None:
        r.carry("train.warmup_steps", int(steps), f"{_PARAMS}.warmup_num_steps")
    elif not is_auto(r.value(f"{_PARAMS}.warmup_num_steps")):
        r.carry("train.warmup_steps", _WARMUP, note="DeepSpeed's default of warmup_num_steps")


def _peak(r: Reading, kind: str) -> None:
    """Carry the peak of the rate, which is the optimizer's where the schedule has none."""
    peak = as_number(r.value(f"{_PARAMS}.warmup_max_lr"))
    if peak is not None and peak > 0:
        r.carry("train.learning_rate", peak, f"{_PARAMS}.warmup_max_lr")
    elif kind == "WarmupDecayLR" and sets_peak(r):
        r.carry(
            "train.learning_rate", _PEAK, note="DeepSpeed's default of warmup_max_lr, whatever the optimizer's lr is"
        )
