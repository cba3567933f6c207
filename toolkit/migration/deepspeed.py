"""A DeepSpeed file: what a job says by keys of its own, what its deepspeed section takes verbatim, and what DeepSpeed ignores.

Source: deepspeed 0.19.8 runtime/config.py, runtime/lr_schedules.py; transformers integrations/deepspeed.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.deepspeed_spec.effects import NEVER_READ
from toolkit.deepspeed_spec.fields import is_auto
from toolkit.deepspeed_spec.job_section import HOMES, UNSUPPORTED, job_keys
from toolkit.deepspeed_spec.nested import is_inside, lookup, without
from toolkit.deepspeed_spec.old_keys import REMOVED
from toolkit.deepspeed_spec.validation import read_config
from toolkit.migration.deepspeed_schedule import schedule, sets_peak
from toolkit.migration.reading import Reading, as_number
from toolkit.migration.table import Row, Subject, Table
from toolkit.migration.values import boolean

# Profiles of a job by the devices of the optimizer and of the parameters.
PROFILES: Mapping[tuple[str, str], str] = {
    ("none", "none"): "none",
    ("cpu", "none"): "optimizer-cpu",
    ("cpu", "cpu"): "full-cpu",
    ("nvme", "none"): "optimizer-nvme",
    ("nvme", "nvme"): "full-nvme",
}
_WHOLE = "zero_optimization"
# Keys of a job's deepspeed section, without the sections around them.
_VERBATIM = tuple(key for key in job_keys() if not any(other.startswith(f"{key}.") for other in job_keys()))


def batch(r: Reading) -> None:
    """Read the three batch keys and the norm of the gradient; "auto" leaves them to the trainer."""
    for key, target in (
        ("train_batch_size", "train.train_batch_size"),
        ("train_micro_batch_size_per_gpu", "train.per_device_train_batch_size"),
        ("gradient_accumulation_steps", "train.gradient_accumulation_steps"),
        ("gradient_clipping", "train.max_grad_norm"),
    ):
        value = r.number(key)
        if value is not None and (value > 0 or key == "gradient_clipping"):
            r.carry(target, value, key)
    if not r.together.trainer and not r.given("gradient_clipping"):
        r.carry("train.max_grad_norm", 0, note="DeepSpeed clips no gradients unless it is told to")


def precision(r: Reading) -> None:
    """Read which 16-bit format is on; neither is fp32."""
    keys = ("bf16.enabled", "bfloat16.enabled", "fp16.enabled")
    on = [key for key in keys if _truth(r.value(key))]
    off = [key for key in keys if r.given(key) and _truth(r.value(key)) is False]
    if on:
        r.carry("train.precision", "fp16" if on[0] == "fp16.enabled" else "bf16", on[0], *off)
    elif not r.together.trainer or len(off) == 2:
        r.carry("train.precision", "fp32", *off)
    else:
        r.unneeded("the trainer's arguments say the number format", *off)
    dtype = r.value("data_types.grad_accum_dtype")
    if str(dtype) in ("bf16", "fp16", "fp32"):
        r.carry("train.gradient_accumulation_dtype", dtype, "data_types.grad_accum_dtype")
    if r.draft.get("train.precision") != "fp16":
        r.unneeded("fp16 is off", *(key for key in r.leaves if key.startswith("fp16.") and not is_auto(r.value(key))))


def _truth(value: Any) -> bool | None:
    try:
        return boolean(value)
    except ValueError:
        return None


def stage(r: Reading) -> None:
    """Read the stage of ZeRO and what is offloaded, as one of the job's profiles."""
    whole = r.value(_WHOLE)
    number = r.number(f"{_WHOLE}.stage") if not isinstance(whole, bool) else int(whole)
    r.carry("parallel.strategy", "zero", *(() if number is None else (f"{_WHOLE}.stage",)))
    if number is not None:
        r.carry("parallel.zero_stage", int(number), f"{_WHOLE}.stage", _WHOLE)
    elif not r.together.strategy or not is_auto(r.value(f"{_WHOLE}.stage")):
        r.carry("parallel.zero_stage", 0, note="DeepSpeed's default where its file has no stage")
    _offload(r)


def _offload(r: Reading) -> None:
    devices = {}
    for part, old in (("optimizer", "cpu_offload"), ("param", "cpu_offload_param")):
        device = r.value(f"{_WHOLE}.offload_{part}.device")
        device = str(device) if str(device) in ("cpu", "nvme") else "none"
        devices[part] = "cpu" if _truth(r.value(f"{_WHOLE}.{old}")) else device
    keys = [
        *(
            f"{_WHOLE}.offload_{part}.device"
            for part in devices
            if not is_auto(r.value(f"{_WHOLE}.offload_{part}.device"))
        ),
        *(f"{_WHOLE}.{old}" for old in ("cpu_offload", "cpu_offload_param")),
    ]
    ratio = as_number(r.value(f"{_WHOLE}.offload_optimizer.ratio"))
    profile = PROFILES.get((devices["optimizer"], devices["param"]))
    if profile == "optimizer-cpu" and ratio is not None and 0 < ratio < 1:
        r.carry("parallel.offload", "optimizer-cpu-partial", *keys)
        r.carry("parallel.offload_ratio", ratio, f"{_WHOLE}.offload_optimizer.ratio")
    elif profile is not None:
        if profile != "none" or any(r.given(key) for key in keys):
            r.carry("parallel.offload", profile, *keys)
        r.unneeded("all of the optimizer state is offloaded, or none", f"{_WHOLE}.offload_optimizer.ratio")
    else:
        fix = "parallel.offload may be " + ", ".join(dict.fromkeys(PROFILES.values()))
        r.refuse(
            f"a job has no profile with the optimizer on {devices['optimizer']} and parameters on {devices['param']}",
            *keys,
            fix=fix,
        )
    paths = [f"{_WHOLE}.offload_{part}.nvme_path" for part in devices]
    for part, path in zip(devices, paths, strict=True):
        if devices[part] == "nvme" and r.given(path):
            r.carry("cluster.nvme_path", str(r.value(path)), path)
    r.unneeded("nothing of it is offloaded to NVMe", *paths)
    for part, device in devices.items():
        below = [key for key in r.leaves if key.startswith(f"{_WHOLE}.offload_{part}.") and key not in (*keys, *paths)]
        if device == "none":
            r.unneeded("nothing of it is offloaded", *(key for key in below if not is_auto(r.value(key))))


def optimizer(r: Reading) -> None:
    """Read DeepSpeed's optimizer, whose Adam decouples weight decay unless it is told not to."""
    kind = r.value("optimizer.type")
    mine = [key for key in r.leaves if key.startswith("optimizer.")]
    if kind is None:
        if not r.together.trainer:
            r.unneeded("it has no type", *mine)
        return
    name = str(kind).lower()
    torch_adam = _truth(r.value("optimizer.params.torch_adam"))
    known = {"adam": "adamw", "adamw": "adamw", "lion": "lion", "sgd": "sgd", "muon": "muon"}
    if name not in known or (name == "adam" and _truth(r.value("optimizer.params.adam_w_mode")) is False):
        fix = "train.optimizer may be adamw, adamw_torch, adamw_8bit, paged_adamw_8bit, schedule_free_adamw, adafactor, muon, lion or sgd"
        r.refuse(f"a job has no optimizer {kind} of that kind", *mine, fix=fix)
        return
    ours = "adamw_torch" if torch_adam and known[name] == "adamw" else known[name]
    r.carry("train.optimizer", ours, "optimizer.type", "optimizer.params.torch_adam", "optimizer.params.adam_w_mode")
    for key, target in (
        ("lr", "learning_rate"),
        ("weight_decay", "weight_decay"),
        ("eps", "adam_epsilon"),
        ("momentum", "momentum"),
    ):
        value = as_number(r.value(f"optimizer.params.{key}"))
        if value is not None and key == "lr" and sets_peak(r):
            r.unneeded("the schedule sets the rate from its first step", "optimizer.params.lr")
        elif value is not None:
            r.carry(f"train.{target}", value, f"optimizer.params.{key}")
    if not r.together.trainer and not r.given("optimizer.params.lr") and not sets_peak(r):
        r.carry("train.learning_rate", 1e-3, note="DeepSpeed's default of its optimizers")
    betas = r.value("optimizer.params.betas")
    if isinstance(betas, list) and len(betas) == 2 and None not in (pair := [as_number(each) for each in betas]):
        r.carry("train.adam_beta1", pair[0], "optimizer.params.betas")
        r.carry("train.adam_beta2", pair[1], "optimizer.params.betas")
    r.unneeded(
        "DeepSpeed's Adam corrects its moments",
        *(
            "optimizer.params.bias_correction"
            for _ in (0,)
            if _truth(r.value("optimizer.params.bias_correction")) is not False
        ),
    )
    r.refuse(
        "a job has no such option of its optimizers",
        *(key for key in mine if key not in r.entries and not is_auto(r.value(key))),
    )


def others(r: Reading) -> None:
    """Deal with the other keys: by their place in a job, by why it has none, or verbatim."""
    ignored = _ignored(r)
    for key in r.leaves:
        if key in r.entries:
            continue
        if is_auto(r.value(key)):
            r.unneeded("it is \"auto\": the trainer's arguments decide, or DeepSpeed's default", key)
        elif key in ("zero_force_ds_cpu_optimizer", "zero_allow_untested_optimizer"):
            r.unneeded("the plan says it where the optimizer needs it", key)
        elif key == "tensor_parallel.autotp_size" and r.number(key):
            r.carry("parallel.tensor", int(r.number(key) or 1), key)
        elif key in ("compile.enabled", "tensorboard.enabled") and _truth(r.value(key)):
            r.carry(*(("train.torch_compile", True) if key[0] == "c" else ("train.report_to", ["tensorboard"])), key)
        elif (why := ignored.get(key)) is not None:
            r.unneeded(why, key)
        elif is_inside(key, NEVER_READ):
            reader = next(reader for root, reader in NEVER_READ.items() if is_inside(key, (root,)))
            r.unneeded(f"it has no effect on {reader}", key)
        elif is_inside(key, UNSUPPORTED):
            why = next(reason for root, reason in UNSUPPORTED.items() if is_inside(key, (root,)))
            _refuse_unless_off(r, key, why)
        elif is_inside(key, REMOVED):
            fix = next(said for root, said in REMOVED.items() if is_inside(key, (root,)))
            _refuse_unless_off(r, key, "DeepSpeed no longer has it", fix=fix)
        elif is_inside(key, HOMES):
            home = next(said for root, said in HOMES.items() if is_inside(key, (root,)))
            _refuse_unless_off(r, key, "a job says it in another place", fix=f"Set {home}")
        elif (own := _own_name(key)) in _VERBATIM:
            r.carry(f"deepspeed.{own}", r.value(key), key)


def _own_name(key: str) -> str:
    """Return the name of a key of stage 3 for its short one, which DeepSpeed reads as well."""
    section, _, leaf = key.rpartition(".")
    return f"{section}.stage3_{leaf}" if f"{section}.stage3_{leaf}" in _VERBATIM else key


def _refuse_unless_off(r: Reading, key: str, why: str, *, fix: str = "") -> None:
    section, _, leaf = key.rpartition(".")
    off = section and str(r.value(f"{section}.enabled")).lower() == "false"
    if off or (leaf == "enabled" and _truth(r.value(key)) is False) or r.value(key) in (False, None):
        r.unneeded("it is off", key)
    else:
        r.refuse(why, key, fix=fix)


def _ignored(r: Reading) -> dict[str, str]:
    """Return the keys that DeepSpeed itself ignores, each with why."""
    config: Mapping[str, Any] = r.together.deepspeed or {}
    autos = [key for key in r.leaves if is_auto(r.value(key))]
    try:
        findings = read_config(without(config, autos)).findings
    except (TypeError, ValueError, AttributeError):
        return {}
    return {
        found.path: f"DeepSpeed ignores it: {found.path}{found.message}"
        for found in findings
        if found.code == "DEEPSPEED_IGNORED" and lookup(config, found.path) is not None
    }


DEEPSPEED = Table(
    tool="DeepSpeed",
    rows=tuple(Row(key=key, kind="carried", to=f"deepspeed.{key}") for key in _VERBATIM),
    subjects=(
        Subject(
            keys=("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
            to=("train.train_batch_size", "train.per_device_train_batch_size", "train.gradient_accumulation_steps", "train.max_grad_norm"),
            says='The same. "auto" is left to the trainer\'s arguments, here and in every other key.',
            run=batch,
        ),
        Subject(
            keys=("bf16.enabled", "fp16.enabled", "bfloat16.enabled", "data_types.grad_accum_dtype"),
            to=("train.precision", "train.gradient_accumulation_dtype"),
            says="The format that is on; neither is fp32.",
            run=precision,
        ),
        Subject(
            keys=(
                *(_WHOLE, f"{_WHOLE}.stage", f"{_WHOLE}.cpu_offload", f"{_WHOLE}.cpu_offload_param"),
                *(f"{_WHOLE}.offload_{part}.{key}" for part in ("optimizer", "param") for key in ("device", "nvme_path")),
                f"{_WHOLE}.offload_optimizer.ratio",
            ),
            to=("parallel.strategy", "parallel.zero_stage", "parallel.offload", "parallel.offload_ratio", "cluster.nvme_path"),
            says="The devices of optimizer and parameters are one of the job's offload profiles.",
            run=stage,
        ),
        Subject(
            keys=("optimizer.type", *(f"optimizer.params.{key}" for key in ("lr", "betas", "eps", "weight_decay", "momentum", "torch_adam", "adam_w_mode", "bias_correction"))),
            to=("train.optimizer", "train.learning_rate", "train.weight_decay", "train.adam_beta1", "train.adam_beta2", "train.adam_epsilon"),
            says="Adam and AdamW are `adamw`, with `torch_adam` `adamw_torch`; Lion, SGD and Muon.",
            run=optimizer,
        ),
        Subject(
            keys=("scheduler.type", *(f"scheduler.params.{key}" for key in ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "total_num_steps", "cos_min_ratio", "warmup_min_ratio"))),
            to=("train.lr_scheduler_type", "train.warmup_steps", "train.learning_rate", "train.max_steps"),
            says="WarmupLR, WarmupDecayLR and WarmupCosineLR are `constant_with_warmup`, `linear` and `cosine_with_min_lr`.",
            run=schedule,
        ),
        Subject(
            keys=(*(key for key in HOMES if "." not in key and key not in ("optimizer", "scheduler", "data_types", "bfloat16")), *UNSUPPORTED, *NEVER_READ),
            to=("parallel.tensor", "train.torch_compile", "train.report_to"),
            says="What DeepSpeed reads and a job does not have is told with its reason; what DeepSpeed never reads is not needed.",
            run=others,
        ),
    ),
    source="DeepSpeed 0.19.8",
    has_whole=False,
)  # fmt: skip
