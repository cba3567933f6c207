"""How keys of transformers' TrainingArguments are read together; TRL, LLaMA-Factory and ms-swift build on them, axolotl has other names.

Source: transformers 4.40 to 5.24 training_args.py, trainer.py, optimization.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.migration.reading import Reading, as_list, as_mapping, as_number
from toolkit.migration.values import OPTIMIZERS, OPTIMIZERS_BUT, boolean, positive

_SCHEDULES = ("constant", "constant_with_warmup", "linear", "cosine", "polynomial", "inverse_sqrt")


def length(r: Reading) -> None:
    """Read how long the run is: a number of steps wins over epochs (trainer.py set_initial_training_values)."""
    steps, epochs = r.number("max_steps"), r.number("num_train_epochs")
    if steps is not None and steps > 0:
        r.carry("train.max_steps", steps, "max_steps")
        r.unneeded("max_steps is the length of the run, and wins", "num_train_epochs")
        return
    r.unneeded("it is no number of steps: the epochs are the length of the run", "max_steps")
    if r.draft.is_said("train.max_steps"):
        r.unneeded("total_num_steps of the DeepSpeed file is the length of the run", "num_train_epochs")
        return
    if epochs is not None and epochs > 0:
        r.carry("train.num_train_epochs", epochs, "num_train_epochs")
    else:
        r.refuse("it is no number of passes over the data", "num_train_epochs", fix="Set train.num_train_epochs")


def schedule(r: Reading) -> None:
    """Read learning rate, its schedule and the warm-up."""
    rate(r)
    shape(r)
    warmup(r)


def rate(r: Reading) -> None:
    """Read the peak of the learning rate."""
    peak = r.number("learning_rate")
    if peak is not None and peak > 0:
        r.carry("train.learning_rate", peak, "learning_rate")
    r.refuse("it is no rate", "learning_rate", fix="Set train.learning_rate")


def shape(r: Reading) -> None:
    """Read the shape of the learning rate after the warm-up."""
    name, options = _schedule_name(r), as_mapping(r.value("lr_scheduler_kwargs"))
    keys = ("lr_scheduler_type", "lr_scheduler_kwargs")
    lowest = _min_ratio(options, r.number("learning_rate"))
    config = r.together.deepspeed
    if isinstance(config, Mapping) and isinstance(config.get("scheduler"), Mapping) and config["scheduler"].get("type"):
        r.unneeded("the DeepSpeed file has the schedule, and wins", *keys)
    elif name == "cosine_with_min_lr" and lowest is not None and len(options) == 1:
        r.carry("train.lr_scheduler_type", name, "lr_scheduler_type")
        r.carry("train.min_learning_rate_ratio", lowest, "lr_scheduler_kwargs")
    elif name == "cosine_with_restarts" and options.get("num_cycles", 1) == 1 and not set(options) - {"num_cycles"}:
        r.carry("train.lr_scheduler_type", "cosine", *keys, note="one cycle, which is the cosine schedule")
    elif name in _SCHEDULES:
        r.carry("train.lr_scheduler_type", name, "lr_scheduler_type")
        fix = "cosine_with_min_lr has train.min_learning_rate_ratio"
        if not options:
            r.unneeded("it is empty", "lr_scheduler_kwargs")
        r.refuse(f"{name} has no options in a job", "lr_scheduler_kwargs", fix=fix)
    else:
        fix = f"train.lr_scheduler_type may be {', '.join(_SCHEDULES)} or cosine_with_min_lr with train.min_learning_rate_ratio; the job has cosine"
        r.refuse(f"a job has no schedule {name} with these options", *keys, fix=fix)


def _schedule_name(r: Reading) -> str:
    return str(r.value("lr_scheduler_type") or "linear").lower().removeprefix("schedulertype.")


def _min_ratio(options: Mapping[str, Any], rate: float | None) -> float | None:
    lowest = as_number(options.get("min_lr"))
    if lowest is not None:
        return float(f"{lowest / rate:.9g}") if rate else None
    return as_number(options.get("min_lr_rate"))


def warmup(r: Reading) -> None:
    """Read the length of the warm-up."""
    if (r.draft.get("train.lr_scheduler_type") or _schedule_name(r)) == "constant":
        r.unneeded("the constant schedule has no warm-up", "warmup_steps", "warmup_ratio")
        return
    steps, ratio = r.number("warmup_steps"), r.number("warmup_ratio")
    if steps is not None and 0 < steps < 1:  # transformers 5: a number of steps below 1 is a share of them
        r.carry("train.warmup_ratio", steps, "warmup_steps")
        r.unneeded("warmup_steps wins", "warmup_ratio")
    elif steps:
        r.carry("train.warmup_steps", int(steps), "warmup_steps")
        r.unneeded("warmup_steps wins", "warmup_ratio")
    elif ratio:
        r.carry("train.warmup_ratio", ratio, "warmup_ratio")
        r.unneeded("it is 0: warmup_ratio is the length of the warm-up", "warmup_steps")
    elif steps is not None or ratio is not None:
        r.carry("train.warmup_steps", 0, "warmup_steps", "warmup_ratio")


def precision(r: Reading) -> None:
    """Read the number format: a switch for each, and fp32 without any."""
    keys = tuple(key for key in ("bf16", "fp16") if r.given(key))
    on = [key for key in ("bf16", "fp16") if r.is_on(key)]
    if len(on) == 2 and not r.given("bf16"):
        on = ["fp16"]
    if len(on) == 2:
        r.refuse("bf16 and fp16 are both on, which Trainer refuses", *keys, fix="Set train.precision to one of them")
    elif on:
        r.carry("train.precision", on[0], *keys)
    else:
        r.carry("train.precision", "fp32", *keys, note="" if keys else "neither bf16 nor fp16 is on")


def _offloads_optimizer(r: Reading) -> bool:
    return r.draft.get("parallel.offload") not in (None, "none", "activations-cpu")


def optimizer(r: Reading) -> None:
    """Read the optimizer; one that a DeepSpeed file names wins (integrations/deepspeed.py deepspeed_optim_sched)."""
    name = str(r.value("optim") or "adamw_torch").lower().removeprefix("optimizernames.")
    if r.is_on("adafactor"):
        name = "adafactor"
        r.carry("train.optimizer", name, "adafactor")
    else:
        r.unneeded("it is off", "adafactor")
    if r.together.deepspeed is not None and "optimizer" in r.together.deepspeed:
        r.unneeded("the DeepSpeed file names the optimizer, and wins", "optim")
    elif OPTIMIZERS.get(name, "").startswith("adamw_torch") and _offloads_optimizer(r):
        r.carry("train.optimizer", "adamw", "optim", note="under offload Accelerate replaces it by DeepSpeed's CPUAdam")
    elif name in OPTIMIZERS:
        r.carry("train.optimizer", OPTIMIZERS[name], "optim")
    elif name in OPTIMIZERS_BUT:
        ours, note = OPTIMIZERS_BUT[name]
        r.carry("train.optimizer", ours, "optim", note=note)
    else:
        fix = f"train.optimizer may be {', '.join(dict.fromkeys(OPTIMIZERS.values()))}; the job has the default, adamw"
        r.refuse(f"a job has no optimizer {name}", "optim", fix=fix)


def checkpointing(r: Reading) -> None:
    """Read whether layers recompute their activations; how torch does it makes no difference to the result."""
    keys = ("gradient_checkpointing", "activation_checkpointing")
    options = ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs")
    value = next((r.value(key) for key in keys if r.given(key)), r.value("gradient_checkpointing"))
    if str(value).lower() in ("offload", "unsloth", "true", "false") or isinstance(value, bool):
        on = str(value).lower() != "false"
        if not on and r.draft.get("train.gradient_checkpointing") is True:
            r.unneeded("FSDP's own activation_checkpointing is on", *keys, *options)
            return
        r.carry("train.gradient_checkpointing", on, *keys)
        if str(value).lower() in ("offload", "unsloth"):
            offload_activations(r, "gradient_checkpointing")
    elif value is not None:
        r.refuse(
            "a job recomputes, or keeps layers' inputs in host memory",
            *keys,
            fix="Set train.gradient_checkpointing: true, and parallel.offload: activations-cpu",
        )
    every = as_mapping(next((r.value(key) for key in options if r.given(key)), None)).get("every_n_layers")
    if isinstance(every, int) and every > 1 and value:
        r.carry("train.gradient_checkpointing", {"every_n_layers": every}, *keys, *options)
    r.unneeded("recomputing gives the same result with and without reentrant autograd; the job is without", *options)


def offload_activations(r: Reading, key: str) -> None:
    """Carry activations that are kept in host memory, which are the layers' inputs where layers recompute."""
    if r.draft.get("parallel.offload") in (None, "none", "activations-cpu"):
        r.carry("parallel.offload", "activations-cpu", key)
    else:
        fix = f"parallel.offload is {r.draft.get('parallel.offload')}; the profile activations-cpu moves activations alone"
        r.refuse("a job has one offload profile, and the optimizer's or the weights' is needed", key, fix=fix)


def liger(r: Reading) -> None:
    """Read which of Liger's kernels run."""
    chosen = as_mapping(r.value("liger_kernel_config"))
    if not r.is_on("use_liger_kernel"):
        r.unneeded("Liger's kernels are off", "use_liger_kernel", "liger_kernel_config")
        return
    keys = ("use_liger_kernel", "liger_kernel_config")
    note = "rotary embeddings stay the model's"
    if chosen.get("fused_linear_cross_entropy", True):
        r.carry("train.loss", "liger", *keys)
    if chosen.get("rms_norm", True) or chosen.get("swiglu", True):
        r.carry("train.kernels", "liger", *keys, note=note)
    r.unneeded("it picks none of the kernels", *keys)


DDP = ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph")
_FSDP_ENDINGS = {
    "reshard_after_forward": "reshard_after_forward",
    "cpu_offload": "cpu_offload",
    "offload_params": "cpu_offload",
}


def strategy(r: Reading) -> None:
    """Read how the ranks share the model: a DeepSpeed file, FSDP, or else DDP."""
    if r.together.deepspeed is not None and r.given("deepspeed"):
        r.follow("deepspeed")
    if r.together.deepspeed is not None and r.given("deepspeed_config"):
        r.follow("deepspeed_config")
    fsdp, options = r.value("fsdp"), as_mapping(r.value("fsdp_config"))
    files = [key for key in ("fsdp", "fsdp_config") if str(r.value(key)).endswith(".json")]
    if files:
        r.draft.notes.append(
            f"{', '.join(str(r.value(key)) for key in files)}: its keys of FSDP are not read; parallel.fsdp2 has what they may say"
        )
        fsdp = True if "fsdp" in files else fsdp
    modes = as_list(fsdp) if not isinstance(fsdp, bool) else (["full_shard"] if fsdp else [])
    if not modes and (options or files) and r.together.deepspeed is None:
        modes = ["full_shard"]
    if modes and r.together.deepspeed is None:
        _fsdp(r, modes, options)
    else:
        r.unneeded("FSDP is off", "fsdp", "fsdp_config", "fsdp_min_num_params", "fsdp_transformer_layer_cls_to_wrap")
        if r.together.deepspeed is None and not r.together.strategy:
            note = f"{r.table.tool} without DeepSpeed and FSDP"
            r.carry("parallel.strategy", "ddp", note=note)
    r.refuse("it names no file that is read", "deepspeed", "deepspeed_config", fix="Name the DeepSpeed file, too")
    _ddp(r)


def _ddp(r: Reading) -> None:
    if r.draft.get("parallel.strategy") != "ddp":
        r.unneeded("the ranks do not train with DDP", *DDP)
        return
    for key, convert in zip(DDP, (boolean, positive, boolean, boolean), strict=True):
        if r.given(key):
            try:
                r.carry(f"parallel.ddp.{key.removeprefix('ddp_')}", convert(r.value(key)), key)
            except ValueError as error:
                r.refuse(str(error), key)


def _fsdp(r: Reading, modes: list[str], options: dict[str, Any]) -> None:
    """Carry FSDP of either version as FSDP2, which shards the same state (trainer.py, accelerate FullyShardedDataParallelPlugin)."""
    options = {key.removeprefix("fsdp_"): value for key, value in options.items()}
    if "no_shard" in modes:
        r.carry("parallel.strategy", "ddp", "fsdp", "fsdp_config", note="no_shard keeps all state on each rank, as DDP")
        return
    kept = "shard_grad_op" in modes or "hybrid_shard_zero2" in modes
    reshards = options.get("reshard_after_forward", not kept)
    offloads = "offload" in modes or bool(options.get("cpu_offload") or options.get("offload_params"))
    note = "FSDP2, which shards the same state"
    r.carry("parallel.strategy", "fsdp2", "fsdp", "fsdp_config", note=note)
    if isinstance(reshards, bool) and not reshards:
        r.carry("parallel.fsdp2.reshard_after_forward", False, "fsdp", "fsdp_config")
    if offloads:
        r.carry("parallel.fsdp2.cpu_offload", True, "fsdp", "fsdp_config")
    if any(mode.startswith("hybrid") for mode in modes):
        nodes = r.draft.get("cluster.nodes") or 1
        r.carry("parallel.fsdp2.dp_replicate_size", nodes, "fsdp", note="a replica of the model for each node")
    if options.get("activation_checkpointing"):
        r.carry("train.gradient_checkpointing", True, "fsdp_config")
    r.unneeded("each decoder layer is one unit of FSDP2", "fsdp_min_num_params", "fsdp_transformer_layer_cls_to_wrap")


def grouping(r: Reading) -> None:
    """Read whether rows of similar length go together."""
    on = r.is_on("group_by_length") or str(r.value("train_sampling_strategy")) == "group_by_length"
    keys = ("group_by_length", "train_sampling_strategy")
    packs = r.draft.get("data.packing")
    if on and packs == "none":
        r.carry("data.group_by_length", True, *keys)
    elif on:
        r.refuse(
            "only rows of one document have different lengths",
            *keys,
            fix="Set data.packing: none and data.group_by_length: true",
        )
    elif str(r.value("train_sampling_strategy")) in ("None", "random"):
        r.unneeded("rows are drawn at random", *keys)
    else:
        r.refuse("a job draws rows at random", "train_sampling_strategy")
        r.unneeded("rows are drawn at random", "group_by_length")


RESUME = "a run is resumed by the command, not by its job"
NO_CLIP = "DeepSpeed clips no gradients where its file has no gradient_clipping, whatever max_grad_norm is; set train.max_grad_norm: 0 to keep that"


def clipping(r: Reading) -> None:
    """Read the largest norm of the gradient, which under DeepSpeed its own file decides."""
    norm = r.number("max_grad_norm")
    config = r.together.deepspeed
    if norm is None or norm < 0:
        r.refuse("it is no norm", "max_grad_norm", fix="Set train.max_grad_norm; 0 never clips")
        return
    r.carry("train.max_grad_norm", norm, "max_grad_norm")
    if config is not None and norm and "gradient_clipping" not in config:
        r.draft.notes.append(NO_CLIP)
