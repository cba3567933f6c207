"""The keys of transformers' TrainingArguments, on which TRL, LLaMA-Factory and ms-swift build, and axolotl under other names.

Source: transformers 4.40 to 5.24 training_args.py, trainer.py, optimization.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.migration.reading import Reading, as_list, as_mapping, as_number
from toolkit.migration.table import Row, Subject, Table, carried, not_carried, not_needed
from toolkit.migration.values import OPTIMIZERS, OPTIMIZERS_BUT, TRACKERS, boolean, number, positive, text

_SCHEDULES = ("constant", "constant_with_warmup", "linear", "cosine", "polynomial", "inverse_sqrt")


def length(r: Reading) -> None:
    """Read how long the run is: a number of steps wins over epochs (trainer.py set_initial_training_values)."""
    steps, epochs = r.number("max_steps"), r.number("num_train_epochs")
    if steps is not None and steps > 0:
        r.carry("train.max_steps", steps, "max_steps")
        r.unneeded("max_steps is the length of the run, and wins", "num_train_epochs")
        return
    r.unneeded("it is no number of steps: the epochs are the length of the run", "max_steps")
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


def saving(r: Reading) -> None:
    """Read when checkpoints are written."""
    how = str(r.value("save_strategy") or "steps").lower()
    if how in ("false", "no"):
        reason = "without checkpoints between; a job writes one at the end in any case"
        if r.given("save_strategy"):
            r.refuse(reason, "save_strategy", fix="Set train.save_steps above the length of the run")
        r.unneeded("save_strategy is not steps", "save_steps")
    elif how == "epoch" and r.draft.get("train.max_steps") is None:
        r.carry("train.saves_per_epoch", 1, "save_strategy")
        r.unneeded("save_strategy is not steps", "save_steps")
    elif how == "steps":
        r.unneeded("save_steps says when", "save_strategy")
        if (steps := r.number("save_steps")) is not None and steps > 0:
            r.carry("train.save_steps", steps, "save_steps")
        else:
            r.refuse("it is no number of steps", "save_steps", fix="Set train.save_steps")
    else:
        r.refuse(f"a job of that length has no save_strategy {how}", "save_strategy", fix="Set train.save_steps")
        r.unneeded("save_strategy is not steps", "save_steps")


def has_validation(r: Reading) -> bool:
    """Return whether the job has validation data so far."""
    return any(r.draft.get(f"data.{key}") is not None for key in ("eval", "validation_fraction"))


def evaluating(r: Reading) -> None:
    """Read when the model is evaluated; without validation data it is not."""
    key = "eval_strategy" if r.given("eval_strategy") else "evaluation_strategy"
    how = str(r.value(key) or r.value("eval_strategy") or "no").lower()
    strategy = ("eval_strategy", "evaluation_strategy")
    if how in ("false", "no"):
        r.unneeded("there are no evaluations", *strategy, "eval_steps", "eval_on_start")
        for part in ("eval", "eval_split"):
            _forget_validation(r, part)
        if r.draft.get("data.validation_fraction") is not None:
            r.draft.notes.append(
                "the held out documents are not evaluated there; a job evaluates on them as often as it saves"
            )
    elif not has_validation(r):
        reason = "the files name no validation data that a job can read"
        r.refuse(
            reason,
            *strategy,
            "eval_steps",
            "eval_on_start",
            fix="Set data.eval or data.validation_fraction, and train.eval_steps",
        )
    elif how == "epoch" and r.draft.get("train.max_steps") is None:
        r.carry("train.evals_per_epoch", 1, *strategy)
        r.unneeded("the strategy is not steps", "eval_steps")
    elif how == "steps":
        r.unneeded("eval_steps says when", *strategy)
        steps = r.number("eval_steps") or r.number("logging_steps")
        if steps is not None and steps > 0:
            note = "" if r.number("eval_steps") else "as often as metrics are logged"
            r.carry("train.eval_steps", steps, "eval_steps", note=note)
        else:
            r.refuse("it is no number of steps", "eval_steps", fix="Set train.eval_steps")
    else:
        r.refuse(f"a job of that length has no evaluation strategy {how}", *strategy, fix="Set train.eval_steps")
        r.unneeded("the strategy is not steps", "eval_steps")


def _forget_validation(r: Reading, part: str) -> None:
    value = r.draft.values.get(f"data.{part}")
    if value is not None and f"data.{part}" not in r.draft.fixed:
        del r.draft.values[f"data.{part}"]
        for leaf in value.leaves:
            if leaf.key in r.entries and r.entries[leaf.key].target in (f"data.{part}", "data.eval", "data.eval_split"):
                del r.entries[leaf.key]
                r.unneeded("there are no evaluations", leaf.key)


def eval_batch(r: Reading) -> None:
    """Read the batch of evaluations, where there are any."""
    size = r.number("per_device_eval_batch_size")
    if not has_validation(r):
        r.unneeded("there are no evaluations", "per_device_eval_batch_size")
    elif size is not None and size > 0:
        r.carry("train.per_device_eval_batch_size", int(size), "per_device_eval_batch_size")
    r.refuse("it is no number of sequences", "per_device_eval_batch_size")


def logging(r: Reading) -> None:
    """Read how often metrics are logged."""
    how, steps = str(r.value("logging_strategy") or "steps").lower(), r.number("logging_steps")
    if how == "steps" and steps is not None and steps >= 1:
        r.carry("train.logging_steps", int(steps), "logging_steps")
        r.unneeded("logging_steps says when", "logging_strategy")
    else:
        fix = "Set train.logging_steps; metrics.jsonl has every step by default"
        r.refuse("a job logs every so many whole steps", "logging_strategy", "logging_steps", fix=fix)


def reporting(r: Reading) -> None:
    """Read the trackers; other ones than ours are not carried."""
    value = r.value("report_to")
    names = [name.lower() for name in as_list(value)]
    known = [name for name in TRACKERS if name in names]
    other = [name for name in names if name not in (*TRACKERS, "none", "all")]
    if "all" in names:
        fix = f"Name those that you use in train.report_to: {', '.join(TRACKERS)}"
        r.refuse("it means every tracker that happens to be installed", "report_to", fix=fix)
    elif other and not known:
        r.refuse(
            f"a job does not report to {', '.join(other)}",
            "report_to",
            fix=f"train.report_to may be {', '.join(TRACKERS)}; metrics.jsonl has every step",
        )
    elif names:
        note = f"but for {', '.join(other)}: metrics.jsonl has every step for other tools" if other else ""
        r.carry("train.report_to", known, "report_to", note=note)


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


def hub(r: Reading) -> None:
    """Read the repository to which the result is uploaded."""
    name = r.value("hub_model_id")
    details = ("hub_private_repo", "hub_strategy", "hub_always_push", "hub_revision")
    if not r.is_on("push_to_hub"):
        r.unneeded("push_to_hub is off", "push_to_hub", "hub_model_id", *details)
        return
    if name is None:
        fix = "Set train.push_to_hub to owner/name"
        r.refuse("the repository has no name, which Trainer makes of output_dir", "push_to_hub", fix=fix)
    else:
        r.carry("train.push_to_hub", str(name), "hub_model_id", "push_to_hub")
    if r.given("hub_private_repo") and name is not None:
        r.carry("train.hub_private_repo", r.is_on("hub_private_repo"), "hub_private_repo")
    elif name is not None and r.table.defaults.get("hub_private_repo") is not None:
        r.carry("train.hub_private_repo", r.table.defaults["hub_private_repo"])
    if str(r.value("hub_strategy")) in ("None", "end", "every_save"):
        r.unneeded("a job uploads the export of the finished run", "hub_strategy")
    r.refuse("a job uploads the export of the finished run once", *details[1:], fix="Set train.push_to_hub")


def best(r: Reading) -> None:
    """Read which checkpoint is the best; without validation data there is none."""
    keys = ("load_best_model_at_end", "metric_for_best_model", "greater_is_better")
    stops = r.number("early_stopping_patience")
    if not r.is_on("load_best_model_at_end") and not stops:
        r.unneeded("no checkpoint is chosen by a metric", *keys, "early_stopping_patience", "early_stopping_threshold")
        return
    if not has_validation(r):
        r.refuse(
            "the job has no validation data",
            *keys,
            "early_stopping_patience",
            "early_stopping_threshold",
            fix="Set data.eval",
        )
        return
    if r.is_on("load_best_model_at_end"):
        r.carry("train.load_best_model_at_end", True, "load_best_model_at_end")
    r.unneeded("it is off", "load_best_model_at_end")
    if r.given("metric_for_best_model"):
        r.carry("train.metric_for_best_model", str(r.value("metric_for_best_model")), "metric_for_best_model")
    if r.given("greater_is_better"):
        r.carry("train.greater_is_better", r.is_on("greater_is_better"), "greater_is_better")
    if stops:
        r.carry("train.early_stopping_patience", int(stops), "early_stopping_patience")
        if r.given("early_stopping_threshold"):
            r.carry(
                "train.early_stopping_threshold",
                number(r.value("early_stopping_threshold")),
                "early_stopping_threshold",
            )
    r.unneeded("runs are not ended early", "early_stopping_patience", "early_stopping_threshold")


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
    fsdp, options = r.value("fsdp"), as_mapping(r.value("fsdp_config"))
    modes = as_list(fsdp) if not isinstance(fsdp, bool) else (["full_shard"] if fsdp else [])
    if not modes and options and r.together.deepspeed is None:
        modes = ["full_shard"]
    if modes and r.together.deepspeed is None:
        _fsdp(r, modes, options)
    else:
        r.unneeded("FSDP is off", "fsdp", "fsdp_config", "fsdp_min_num_params", "fsdp_transformer_layer_cls_to_wrap")
        if r.together.deepspeed is None and not r.together.strategy:
            note = f"{r.table.tool} without DeepSpeed and FSDP"
            r.carry("parallel.strategy", "ddp", note=note)
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


SUBJECTS: tuple[Subject, ...] = (
    Subject(
        keys=("max_steps", "num_train_epochs"),
        to=("train.max_steps", "train.num_train_epochs"),
        says="A number of steps above 0 wins over epochs.",
        run=length,
    ),
    Subject(
        keys=("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio"),
        to=("train.learning_rate", "train.lr_scheduler_type", "train.min_learning_rate_ratio", "train.warmup_steps", "train.warmup_ratio"),
        says="Schedules of the same name are the same; `min_lr` becomes a share of the peak. `warmup_steps` wins over `warmup_ratio`, and below 1 is a share.",
        run=schedule,
    ),
    Subject(keys=("bf16", "fp16"), to=("train.precision",), says="Neither of the two is fp32.", run=precision),
    Subject(
        keys=("optim", "adafactor"),
        to=("train.optimizer",),
        says="Names of the same update; the optimizer of a DeepSpeed file wins.",
        run=optimizer,
    ),
    Subject(
        keys=("max_grad_norm",),
        to=("train.max_grad_norm",),
        says="The same.",
        run=clipping,
    ),
    Subject(
        keys=("fsdp", "fsdp_config", "deepspeed", "fsdp_min_num_params", "fsdp_transformer_layer_cls_to_wrap", *DDP),
        to=("parallel.strategy", "parallel.fsdp2", "parallel.ddp", "parallel.zero_stage"),
        says="The DeepSpeed file that is named is read too. FSDP of either version is FSDP2; without both the ranks train with DDP.",
        run=strategy,
    ),
    Subject(
        keys=("gradient_checkpointing", "gradient_checkpointing_kwargs", "activation_checkpointing", "activation_checkpointing_kwargs"),
        to=("train.gradient_checkpointing",),
        says="On or off; how torch recomputes makes no difference to the result.",
        run=checkpointing,
    ),
    Subject(
        keys=("use_liger_kernel", "liger_kernel_config"),
        to=("train.loss", "train.kernels"),
        says="`liger` for the fused loss, and for norms and gated activations.",
        run=liger,
    ),
    Subject(
        keys=("save_strategy", "save_steps"),
        to=("train.save_steps", "train.saves_per_epoch"),
        says="By steps, a share of the run, or each epoch.",
        run=saving,
    ),
    Subject(
        keys=("eval_strategy", "evaluation_strategy", "eval_steps", "eval_on_start"),
        to=("train.eval_steps", "train.evals_per_epoch"),
        says="The same for evaluations, where there are validation data; `eval_steps` that is left out is `logging_steps`.",
        run=evaluating,
    ),
    Subject(
        keys=("per_device_eval_batch_size",),
        to=("train.per_device_eval_batch_size",),
        says="The same, where there are validation data.",
        run=eval_batch,
    ),
    Subject(
        keys=("logging_strategy", "logging_steps"),
        to=("train.logging_steps",),
        says="Whole numbers of steps.",
        run=logging,
    ),
    Subject(keys=("report_to",), to=("train.report_to",), says=f"{', '.join(TRACKERS)}; others are not carried.", run=reporting),
    Subject(
        keys=("push_to_hub", "hub_model_id", "hub_private_repo", "hub_strategy", "hub_always_push", "hub_revision"),
        to=("train.push_to_hub", "train.hub_private_repo"),
        says="The name of the repository, if uploads are on.",
        run=hub,
    ),
    Subject(
        keys=("load_best_model_at_end", "metric_for_best_model", "greater_is_better", "early_stopping_patience", "early_stopping_threshold"),
        to=("train.load_best_model_at_end", "train.metric_for_best_model", "train.greater_is_better", "train.early_stopping_patience"),
        says="The same, where there are validation data.",
        run=best,
    ),
    Subject(
        keys=("group_by_length", "train_sampling_strategy"),
        to=("data.group_by_length",),
        says="With one document a row.",
        run=grouping,
    ),
)  # fmt: skip

_LOADER = "the job loads the data itself"
_PROCESS = "the launcher and the toolkit decide it"

ROWS: tuple[Row, ...] = (
    carried("output_dir", "train.output_dir", convert=text),
    carried("per_device_train_batch_size", "train.per_device_train_batch_size", convert=positive),
    carried("gradient_accumulation_steps", "train.gradient_accumulation_steps", convert=positive),
    carried("weight_decay", "train.weight_decay", convert=number),
    carried("adam_beta1", "train.adam_beta1", convert=number),
    carried("adam_beta2", "train.adam_beta2", convert=number),
    carried("adam_epsilon", "train.adam_epsilon", convert=number),
    carried("label_smoothing_factor", "train.label_smoothing_factor", convert=number),
    carried("neftune_noise_alpha", "train.neftune_noise_alpha", convert=number),
    carried("save_total_limit", "train.save_total_limit", convert=positive),
    carried("save_only_model", "train.save_only_model", convert=boolean),
    carried("torch_compile", "train.torch_compile", convert=boolean),
    carried("seed", "train.seed", convert=number),
    *not_needed(
        _LOADER,
        "dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor remove_unused_columns "
        "dataloader_multiprocessing_context dataloader_in_order length_column_name label_names dataloader_drop_last accelerator_config",
    ),
    *not_needed(
        _PROCESS,
        "local_rank ddp_backend ddp_timeout log_on_each_node log_level log_level_replica disable_tqdm no_cuda half_precision_backend fp16_backend "
        "use_mps_device place_model_on_device use_ipex jit_mode_eval tpu_num_cores ray_scope debug skip_memory_metrics xpu_backend n_gpu "
        "torchdynamo",
    ),
    *not_needed(
        "metrics.jsonl has loss, learning rate, norm, tokens and memory of each logged step",
        "logging_first_step logging_nan_inf_filter include_num_input_tokens_seen include_tokens_per_second logging_dir prediction_loss_only "
        "include_for_metrics include_inputs_for_metrics eval_do_concat_batches batch_eval_metrics eval_accumulation_steps eval_use_gather_object "
        "bf16_full_eval fp16_full_eval",
    ),
    *not_needed("a job's loss is the mean over the tokens of the step on all ranks", "average_tokens_across_devices"),
    *not_needed(
        "checkpoints are complete or absent, and a second run needs `toolkit train --overwrite` or `--resume`",
        "overwrite_output_dir save_safetensors save_on_each_node enable_jit_checkpoint restore_callback_states_from_checkpoint",
    ),
    *not_needed("the command trains, and evaluates where there are validation data", "do_train do_eval"),
    *not_needed("the model is trained without a cache of keys and values", "use_cache"),
    *not_needed("torch's allocator keeps its memory", "torch_empty_cache_steps"),
    *not_needed("data order and weights have the one seed of the job", "data_seed"),
    *not_needed("matrix products of fp32 follow torch's own setting", "tf32"),
    *not_carried(RESUME, "resume_from_checkpoint ignore_data_skip", fix="`toolkit train JOB --resume FOLDER`, or `--resume auto`"),
    *not_carried("a job has no predictions", "do_predict"),
    *not_carried("evaluations begin at once", "eval_delay", fix="Set train.eval_steps"),
    *not_carried("the batch is what the job says", "auto_find_batch_size", fix="`toolkit estimate JOB` finds the largest that fits"),
    *not_carried("torch.compile runs with its defaults", "torch_compile_mode", fix="Set train.torch_compile: true"),
    *not_carried("torch.compile runs with its defaults", "torch_compile_backend", off=(None, "inductor"), fix="Set train.torch_compile: true"),
    *not_carried("a job has no options of its optimizers beside betas, epsilon, weight decay and momentum", "optim_args optim_target_modules"),
    *not_carried("a job runs at the speed of nondeterministic kernels", "full_determinism"),
    *not_carried("the name of a run is that of its folder", "run_name", fix="Name train.output_dir, or set WANDB_NAME"),
    *not_carried("a tracker's project is set outside of the job", "project trackio_space_id trackio_bucket_id trackio_static_space_id", off=(None, "", "huggingface"), fix="Set WANDB_PROJECT"),
    *not_carried("a job has no such axes", "parallelism_config", fix="parallel.tensor and parallel.pipeline"),
    *not_carried("tokens stay out of files", "hub_token push_to_hub_token", fix="Set HF_TOKEN, or `hf auth login`"),
    *not_carried("it is an old name", "push_to_hub_model_id push_to_hub_organization", fix="Set train.push_to_hub to owner/name"),
    *not_carried("it is an old name of per_device_train_batch_size", "per_gpu_train_batch_size", fix="Set train.per_device_train_batch_size"),
    *not_carried("it is an old name of per_device_eval_batch_size", "per_gpu_eval_batch_size", fix="Set train.per_device_eval_batch_size"),
    *not_carried("a job runs on cards, or on CPU processes with cluster.gpu: cpu", "use_cpu", fix="Set cluster.gpu: cpu"),
    *not_carried("its values differ from those of bf16 and fp16", "fp16_opt_level past_index mp_parameters", off=(None, "", "O1", -1)),
    *not_carried("batches are not split", "split_batches dispatch_batches"),
)  # fmt: skip

DEFAULTS: Mapping[str, Any] = {
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3,
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "optim": "adamw_torch_fused",
    "max_grad_norm": 1.0,
    "gradient_checkpointing": False,
    "save_strategy": "steps",
    "save_steps": 500,
    "logging_steps": 500,
    "eval_strategy": "no",
    "seed": 42,
    "hub_private_repo": False,
}

TRAINER = Table(
    tool="Trainer",
    rows=ROWS,
    subjects=SUBJECTS,
    defaults=DEFAULTS,
    source="transformers 5.24 TrainingArguments, and its names of 4.40 to 5.23",
)
