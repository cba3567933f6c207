"""The effect on a resume of each job key whose value differs from the checkpoint's run: one row per key.

A key that takes effect in the engine is changed and reported, a key that the layout of the checkpoint's files depends on has it read
weight by weight, a key that its numbers depend on is refused, and one that no number of the run depends on is ignored. Needs no
torch: all of it is reported before any process starts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from toolkit.config.job import ADAMS, TORCH_ADAMW
from toolkit.planning.plan import Plan

_SHARDS = "its shards are for that layout"
_POSITION = "its position in the data would refer to other documents"

Both = Callable[[Plan, Plan], bool]


def _always(now: Plan, then: Plan) -> bool:
    return True


def _never(now: Plan, then: Plan) -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The effect of a key that has changed.

    Args:
        on_change: `told`: takes effect and is reported; `converted`: the checkpoint's files have another layout, and are read weight
            by weight; `refused`; `free`: nothing depends on it; `content`: compared by what is read
            (`toolkit.checkpoint.fingerprint`, the model's configuration), whatever its name.
        code: Error code of a refusal.
        why: Reason against the change, for its message.
        counts: Whether the key applies to plan and checkpoint; if not, its change is ignored.
        fits: For a refused or converted key: whether this change needs neither, and is reported.
        value: Function of the resolved value, if it is not the one of the same name in the settings or in the job.
        default: DeepSpeed's default when the `deepspeed` section leaves the key out.
        name: Name in messages; its path when left out.
        cause: Common cause of refused keys that change together and are reported as one problem.
    """

    on_change: Literal["told", "converted", "refused", "free", "content"]
    code: str = ""
    why: str = ""
    counts: Both = _always
    fits: Both = _never
    value: Callable[[Plan], Any] | None = None
    default: Any = None
    name: str | None = None
    cause: str | None = None


def _lora(name: str) -> Callable[[Plan], Any]:
    return lambda plan: getattr(plan.job.train.adapters, name)


def _keeps_own_rows(now: Plan, then: Plan) -> bool:
    """Return whether each rank saves the optimizer's state of its own rows, as bitsandbytes' under FSDP2 (engine/torch_engine.py)."""
    is_fsdp2 = now.job.parallel.strategy == then.job.parallel.strategy == "fsdp2"
    return is_fsdp2 and _optimizer_is("adamw_8bit", "paged_adamw_8bit", "lion")(now, then)


def _of_sources(plan: Plan) -> Any:
    """Return all of a plan's sources but their paths, which are compared by content."""
    sources = () if plan.job.data is None else plan.job.data.sources or ()
    return [source.model_dump(exclude={"path"}, exclude_defaults=True) for source in sources]


def _of_eval_sets(plan: Plan) -> Any:
    """Return all of a plan's named validation sets but their paths, which are compared by content."""
    sets = {} if plan.job.data is None else plan.job.data.eval_sets
    return {name: source.model_dump(exclude={"path"}, exclude_defaults=True) for name, source in sorted(sets.items())}


def _recomputation(plan: Plan) -> Any:
    written = plan.job.train.recomputation.model_dump(exclude_defaults=True)
    return written or plan.settings.gradient_checkpointing


def _profiled(name: str) -> Callable[[Plan], Any]:
    return lambda plan: getattr(plan.job.train.profile, name, None)


def _sample(name: str) -> Callable[[Plan], Any]:
    return lambda plan: getattr(plan.job.train.samples, name, None)


def _optimizer_is(*names: str) -> Both:
    return lambda now, then: now.job.train.optimizer == then.job.train.optimizer and now.job.train.optimizer in names


def _with_adapters(now: Plan, then: Plan) -> bool:
    return now.job.train.method == then.job.train.method != "full"


def _beside_read_weights(now: Plan, then: Plan) -> bool:
    return _with_adapters(now, then) and now.settings.init == then.settings.init == "pretrained"


def _same_stage(*stages: int) -> Both:
    return lambda now, then: now.settings.zero_stage == then.settings.zero_stage and now.settings.zero_stage in stages


def _sums_matter(now: Plan, then: Plan) -> bool:
    """Return whether the dtype of the gradient sums decides which optimizer has the master weights; a pipeline uses one for all."""
    same_dtype = now.settings.dtype == then.settings.dtype  # else that is the cause: the default depends on it
    return same_dtype and now.grid.pp == 1 and _same_stage(1, 2)(now, then)


def _evaluates(now: Plan, then: Plan) -> bool:
    return now.settings.eval_steps is not None


def _same_batch(now: Plan, then: Plan) -> bool:
    return now.settings.batch.train == then.settings.batch.train


def _same_stages(now: Plan, then: Plan) -> bool:
    stages = [(plan.grid.pp, plan.settings.virtual_stages) for plan in (now, then)]
    return stages[0] == stages[1]


def _same_strategy(now: Plan, then: Plan) -> bool:
    return now.job.parallel.strategy == then.job.parallel.strategy


def _same_devices(now: Plan, then: Plan) -> bool:
    return _places(now) == _places(then)


def _places(plan: Plan) -> tuple[str | None, str | None, bool]:
    """Return the devices of a profile whose files differ: streamed weights are saved as those of the card."""
    profile = plan.profile
    return profile.optimizer, None if profile.streams else profile.parameters, plan.twin_flow


def _same_files(now: Plan, then: Plan) -> bool:
    """Return whether both runs have DDP, or FSDP2 with states of whole weights: torch reads those files on any number of ranks."""
    return _same_strategy(now, then) and now.job.parallel.strategy != "zero" and not _keeps_own_rows(now, then)


_FREE, _TOLD = Rule(on_change="free"), Rule(on_change="told")
_CONTENT = Rule(on_change="content")
_REFUSED = Rule(on_change="refused", code="CHECKPOINT_LAYOUT", why=_SHARDS)
_CONVERTED = replace(_REFUSED, on_change="converted")
_GRID = replace(_CONVERTED, cause="grid")
_ADAPTERS = replace(_REFUSED, counts=_with_adapters)
_SCALE = replace(_ADAPTERS, why="its adapters were trained for that scale")
_SCALER = replace(
    _REFUSED,
    why="it has the loss scaler, whose settings cannot change",
    counts=lambda now, then: now.settings.dtype == then.settings.dtype == "fp16",
)
_ORDER = replace(_REFUSED, code="CHECKPOINT_DATA", why=_POSITION)
_DATA = replace(
    _ORDER,
    counts=lambda now, then: now.job.data is not None and then.job.data is not None,  # else: the user's own script
)
_ADAM = replace(_TOLD, counts=_optimizer_is(*ADAMS))
_BETA = replace(_TOLD, counts=_optimizer_is(*ADAMS, "lion"))
_BATCH = replace(_TOLD, counts=_same_batch)


def _each(rule: Rule, section: str, names: str) -> dict[str, Rule]:
    return {f"{section}.{name}": rule for name in names.split()}


def _options(strategy: str, names: str) -> dict[str, Rule]:
    """Return the rules of a strategy's own section; they count where both runs have the strategy."""

    def counts(now: Plan, then: Plan) -> bool:
        return now.job.parallel.strategy == then.job.parallel.strategy == strategy

    def value(name: str) -> Callable[[Plan], Any]:
        return lambda plan: getattr(getattr(plan.job.parallel, f"{strategy}_options"), name)

    return {f"parallel.{strategy}.{name}": replace(_TOLD, counts=counts, value=value(name)) for name in names.split()}


def _sends_between_nodes(now: Plan, then: Plan) -> bool:
    return now.grid.world_size == then.grid.world_size and _hook(now) == _hook(then) == "top_k"


# Communication hooks that keep what a rank has not sent yet.
KEEPING_HOOKS = frozenset({"power_sgd", "top_k"})


def _hook(plan: Plan) -> str:
    return plan.job.parallel.ddp_options.comm_hook if plan.job.parallel.strategy == "ddp" else "none"


def _with_hook(hook: str, name: str, *, of: str, refuses: bool = False) -> dict[str, Rule]:
    """Return the rule of an option of a hook of DDP; it counts where both runs have the hook."""
    rule = replace(_REFUSED, why="it has that hook's state") if refuses else _TOLD
    counted = replace(
        rule,
        counts=lambda now, then: _hook(now) == _hook(then) == hook,
        value=lambda plan: getattr(plan.job.parallel.ddp_options, of),
    )
    return {f"parallel.ddp.{name}": counted}


# The keys in the order of their names in a message.
RULES: dict[str, Rule] = {
    # Ranks and how they share the model.
    "cluster.gpus_per_node": replace(
        _GRID,
        name="cluster.gpus_per_node × cluster.nodes",
        value=lambda plan: plan.grid.world_size,
        fits=lambda now, then: _same_files(now, then) and not {_hook(now), _hook(then)} & KEEPING_HOOKS,
    ),
    "cluster.nodes": replace(  # counted in the row before: the same ranks may run on other nodes, but for shares of a node
        _REFUSED, why="its residuals are shares of a node's", counts=_sends_between_nodes
    ),
    "parallel.tensor": _GRID,
    "parallel.experts": replace(
        _CONVERTED,
        counts=lambda now, then: now.grid.tp == then.grid.tp > 1,  # else the grid is the cause
        value=lambda plan: plan.settings.experts,
    ),
    "parallel.pipeline": _GRID,
    "parallel.virtual_stages": _GRID,
    "parallel.context": _TOLD,  # its ranks shard and save as data-parallel ranks do
    "parallel.strategy": _CONVERTED,
    **_options("ddp", "bucket_cap_mb find_unused_parameters static_graph broadcast_buffers gradient_as_bucket_view"),
    "parallel.ddp.comm_hook": replace(
        _REFUSED,
        why="what a hook has not sent yet is a part of a checkpoint",
        counts=_same_strategy,
        value=_hook,
        fits=lambda now, then: not {_hook(now), _hook(then)} & KEEPING_HOOKS,
    ),
    **_with_hook("power_sgd", "power_sgd_start_step", of="start_step"),
    **_with_hook("top_k", "top_k_ratio", of="sent_ratio"),
    **_with_hook("power_sgd", "power_sgd_rank", of="rank_of_products", refuses=True),
    **_options("fsdp2", "reshard_after_forward reduce_dtype cpu_offload"),
    "parallel.fsdp2.dp_replicate_size": replace(  # other files fit any sharding
        _CONVERTED,
        counts=_same_strategy,
        fits=lambda now, then: not _keeps_own_rows(now, then),
        value=lambda plan: plan.job.parallel.fsdp2_options.dp_replicate_size,
    ),
    "parallel.zero_stage": replace(_CONVERTED, counts=_same_strategy),  # else the strategy is the cause
    "train.precision": replace(
        _REFUSED,  # fp8 affects the products alone, not the saved state
        fits=lambda now, then: now.settings.dtype == then.settings.dtype,
    ),
    "train.method": _REFUSED,
    "train.lora.r": replace(_ADAPTERS, value=_lora("r")),
    "train.lora.lora_alpha": replace(_SCALE, value=_lora("lora_alpha")),
    "train.lora.lora_dropout": replace(_TOLD, counts=_with_adapters, value=_lora("lora_dropout")),
    "train.lora.target_modules": replace(_ADAPTERS, value=_lora("target_modules")),
    "train.lora.modules_to_save": replace(_ADAPTERS, value=_lora("modules_to_save")),
    "train.lora.use_rslora": replace(_SCALE, value=_lora("use_rslora")),
    "train.lora.use_dora": replace(_ADAPTERS, value=_lora("use_dora")),
    "train.lora.rank_pattern": replace(_ADAPTERS, value=_lora("rank_pattern")),
    "train.lora.alpha_pattern": replace(_SCALE, value=_lora("alpha_pattern")),
    "train.lora.init_lora_weights": replace(  # the checkpoint has the adapters, and a base that they have changed
        _ADAPTERS,
        why="its base is without what adapters began with under pissa alone",
        value=lambda plan: "pissa" if plan.job.train.changes_base else None,
    ),
    "train.lora.adapter": _FREE,
    "train.lora.loraplus_lr_ratio": replace(
        _CONVERTED,  # it splits the parameters into groups
        counts=_with_adapters,
        value=_lora("loraplus_lr_ratio"),
        fits=lambda now, then: None not in (_lora("loraplus_lr_ratio")(now), _lora("loraplus_lr_ratio")(then)),
    ),
    "train.freeze": _REFUSED,
    "train.freeze_vision": replace(_REFUSED, value=lambda plan: plan.settings.freeze_vision),
    "train.learning_rates": replace(
        _CONVERTED,  # the same
        fits=lambda now, then: list(now.job.train.learning_rates) == list(then.job.train.learning_rates),
    ),
    # Both of torch's have the same state.
    "train.optimizer": replace(
        _REFUSED, fits=lambda now, then: {now.job.train.optimizer, then.job.train.optimizer} <= set(TORCH_ADAMW)
    ),
    "train.weight_decay": replace(
        _CONVERTED,  # it splits the parameters into two groups
        fits=lambda now, then: bool(now.job.train.weight_decay) == bool(then.job.train.weight_decay),
    ),
    "train.momentum": replace(
        _REFUSED,
        why="its optimizer state is for that one",
        counts=_optimizer_is("sgd", "muon"),
        value=lambda plan: plan.job.train.used_momentum,
        fits=lambda now, then: bool(now.job.train.used_momentum) == bool(then.job.train.used_momentum),
    ),
    "parallel.offload": replace(_CONVERTED, fits=_same_devices),
    "parallel.offload_engine": replace(  # the state is one and the same; the order of its sums is not
        _TOLD,
        counts=lambda now, then: None not in (now.offload_engine, then.offload_engine) and _same_devices(now, then),
        value=lambda plan: plan.offload_engine,
    ),
    "parallel.offload_ratio": replace(_CONVERTED, counts=lambda now, then: now.twin_flow and then.twin_flow),
    "parallel.partition": replace(_CONVERTED, counts=_same_stages),  # else the stages are the cause
    "train.gradient_accumulation_dtype": replace(_CONVERTED, fits=lambda now, then: not _sums_matter(now, then)),
    "deepspeed.zero_optimization.round_robin_gradients": replace(_CONVERTED, counts=_same_stage(1, 2), default=False),
    "deepspeed.zero_optimization.sub_group_size": replace(  # the length of each flat group of master weights
        _CONVERTED, counts=_same_stage(3), value=lambda plan: plan.settings.sub_group_size
    ),
    # The loaded loss scaler keeps its settings (deepspeed runtime/zero/stage_1_and_2.py _load_global_state).
    "deepspeed.fp16.loss_scale": replace(_SCALER, default=0),
    "deepspeed.fp16.initial_scale_power": replace(_SCALER, default=16),
    "deepspeed.fp16.loss_scale_window": replace(_SCALER, default=1000),
    "deepspeed.fp16.hysteresis": replace(_SCALER, default=2),
    "deepspeed.fp16.consecutive_hysteresis": replace(_SCALER, default=False),
    "deepspeed.fp16.min_loss_scale": replace(_SCALER, default=1),
    # Settings that determine the order of the rows: a step is a position in the data.
    "train.train_batch_size": replace(_ORDER, value=lambda plan: plan.settings.batch.train),
    "train.sequence_length": _ORDER,
    "train.seed": _ORDER,
    **_each(
        _DATA,
        "data",
        "name revision split validation_fraction format packing loss_on max_samples"
        " preprocess system_prompt long_rows group_by_length streaming shuffle_buffer",
    ),
    "data.sources": replace(_DATA, value=_of_sources),
    **_each(_CONTENT, "data", "train chat_template"),
    "data.eval": replace(_TOLD, value=_of_eval_sets),  # its paths by content
    "data.eval_split": _TOLD,
    # The model that is trained; with adapters the base weights come from the job's model, not from the checkpoint.
    "model.name": replace(_TOLD, counts=_beside_read_weights, value=lambda plan: plan.model.name),
    "model.revision": replace(_TOLD, counts=_beside_read_weights, value=lambda plan: plan.model.revision),
    "model.task": replace(
        _REFUSED, value=lambda plan: plan.settings.task, why="its checkpoint has the head of another task"
    ),
    **_each(replace(_REFUSED, why="its head has other labels"), "model", "num_labels problem_type"),
    "model.labels": _TOLD,
    "model.init": replace(_REFUSED, counts=_with_adapters, why="its adapters were trained on those weights"),
    "model.tokenizer": _CONTENT,
    **_each(_ORDER, "model", "added_tokens added_special_tokens"),
    "model.pad_vocab_to_multiple_of": _CONTENT,
    **_each(_CONTENT, "model", "rope_scaling.type rope_scaling.factor"),
    "model.trust_remote_code": _FREE,
    # Settings of the steps that follow.
    "train.learning_rate": _TOLD,
    "train.learning_rate_scaling": _FREE,  # in the row before
    "train.learning_rate_reference_batch_size": _FREE,
    **_each(
        _TOLD, "train", "lr_scheduler_type min_learning_rate_ratio warmup_steps warmup_ratio max_steps num_train_epochs"
    ),
    "train.adam_beta1": _BETA,
    "train.adam_beta2": _BETA,
    "train.adam_epsilon": _ADAM,
    "train.max_grad_norm": _TOLD,
    "train.per_device_train_batch_size": replace(_BATCH, value=lambda plan: plan.settings.batch.micro),
    "train.gradient_accumulation_steps": replace(_BATCH, value=lambda plan: plan.settings.batch.accumulation),
    "train.per_device_eval_batch_size": replace(_TOLD, counts=_evaluates),
    "train.fp8.recipe": replace(
        _TOLD,
        counts=lambda now, then: now.settings.precision == then.settings.precision == "fp8",
        value=lambda plan: plan.job.train.float8.recipe,
    ),
    **_each(
        _TOLD,
        "train",
        "attention loss kernels torch_compile label_smoothing_factor z_loss neftune_noise_alpha router_aux_loss_coef compute_loss",
    ),
    "train.gradient_checkpointing": replace(_TOLD, value=_recomputation),
    "train.mlp_tiles": _TOLD,
    **_each(_FREE, "train", "saves_per_epoch evals_per_epoch"),  # in save_steps and eval_steps
    **_each(_FREE, "train", "images_per_sample image_size"),  # of the estimate alone
    **_each(_TOLD, "parallel", "sequence_parallel pipeline_schedule"),
    **_each(
        _TOLD,
        "train",
        "save_steps save_total_limit save_only_model save_async eval_steps logging_steps hang_timeout_minutes report_to callbacks",
    ),
    **_each(
        _TOLD, "train", "eval_on_start compute_metrics load_best_model_at_end metric_for_best_model greater_is_better"
    ),
    **_each(_TOLD, "train", "early_stopping_patience early_stopping_threshold"),
    **{
        f"train.profile.{name}": replace(_TOLD, value=_profiled(name))
        for name in ("wait", "warmup", "active", "repeat")
    },
    **{f"train.samples.{name}": replace(_TOLD, value=_sample(name)) for name in ("prompts", "max_new_tokens")},
    # Location and length of the run.
    "train.output_dir": _FREE,
    **_each(_FREE, "train", "push_to_hub hub_private_repo"),
    **_each(_FREE, "cluster", "gpu host_memory_gib nvme_path numa_binding master_port transformers kernel_packages"),
    # How DeepSpeed moves data and what it prints; its shards are the same.
    **_each(
        _TOLD,
        "deepspeed.zero_optimization",
        """
        contiguous_gradients reduce_scatter reduce_bucket_size allgather_bucket_size overlap_comm
        offload_optimizer offload_param stage3_prefetch_bucket_size stage3_param_persistence_threshold
        stage3_max_live_parameters stage3_max_reuse_distance stage3_module_granularity_threshold
        stage3_allgather_sequential zero_hpz_partition_size zero_quantized_weights zero_quantized_gradients
        use_multi_rank_bucket_allreduce ignore_unused_parameters stage3_gather_16bit_weights_on_model_save
        memory_efficient_linear log_trace_cache_warnings enable_sanity_checks
        """,
    ),
    **_each(
        _TOLD,
        "deepspeed",
        """
        bf16 communication_data_type prescale_gradients gradient_predivide_factor steps_per_print wall_clock_breakdown
        memory_breakdown dump_state comms_logger flops_profiler aio log_level disable_python_gc
        """,
    ),
}
