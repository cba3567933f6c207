"""The DeepSpeed keys that a job's `deepspeed` section may hold, with DeepSpeed's own types and limits.

DeepSpeed checks the inside of `zero_optimization`, `fp16` and `bf16` only when the engine starts, and ignores unknown
keys elsewhere; here both are errors before anything starts.
Sources: deepspeed runtime/config.py, runtime/zero/config.py, runtime/zero/offload_config.py,
runtime/precision_config.py, comm/config.py, profiling/config.py, monitor/config.py, runtime/swap_tensor/aio_config.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

Elements = Annotated[StrictInt, Field(ge=0)]
PositiveElements = Annotated[StrictInt, Field(gt=0)]
EvenElements = Annotated[StrictInt, Field(gt=0, multiple_of=2)]  # stage_1_and_2.py nccl_start_alignment_factor
Number = Annotated[float, Field(ge=0, strict=True)]
PositiveNumber = Annotated[float, Field(gt=0, strict=True)]


class _Keys(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)


class OffloadOptimizerKeys(_Keys):
    """runtime/zero/offload_config.py DeepSpeedZeroOffloadOptimizerConfig, but what the profile sets."""

    pin_memory: StrictBool | None = None
    buffer_count: PositiveElements | None = None
    pipeline_read: StrictBool | None = None
    pipeline_write: StrictBool | None = None
    fast_init: StrictBool | None = None


class OffloadParamKeys(_Keys):
    """runtime/zero/offload_config.py DeepSpeedZeroOffloadParamConfig, but what the profile sets."""

    pin_memory: StrictBool | None = None
    buffer_count: PositiveElements | None = None
    buffer_size: PositiveElements | None = None
    max_in_cpu: Elements | None = None


class ZeroKeys(_Keys):
    """runtime/zero/config.py DeepSpeedZeroConfig, but what the job file sets or what has no effect any more."""

    contiguous_gradients: StrictBool | None = None
    reduce_scatter: StrictBool | None = None
    reduce_bucket_size: PositiveElements | None = None
    allgather_bucket_size: EvenElements | None = None
    overlap_comm: StrictBool | None = None
    round_robin_gradients: StrictBool | None = None
    offload_optimizer: OffloadOptimizerKeys | None = None
    offload_param: OffloadParamKeys | None = None
    sub_group_size: PositiveElements | None = None
    stage3_prefetch_bucket_size: Elements | None = None
    stage3_param_persistence_threshold: Elements | None = None
    stage3_max_live_parameters: Elements | None = None
    stage3_max_reuse_distance: Elements | None = None
    stage3_module_granularity_threshold: Elements | None = None
    stage3_allgather_sequential: StrictBool | None = None
    zero_hpz_partition_size: PositiveElements | None = None
    zero_quantized_weights: StrictBool | None = None
    zero_quantized_gradients: StrictBool | None = None
    memory_efficient_linear: StrictBool | None = None
    log_trace_cache_warnings: StrictBool | None = None
    enable_sanity_checks: StrictBool | None = None


class Fp16Keys(_Keys):
    """runtime/precision_config.py DeepSpeedFP16Config: loss scaling."""

    loss_scale: Number | None = None
    initial_scale_power: Annotated[StrictInt, Field(ge=0, le=31)] | None = None
    loss_scale_window: PositiveElements | None = None
    hysteresis: Elements | None = None
    consecutive_hysteresis: StrictBool | None = None
    min_loss_scale: PositiveElements | None = None


class Bf16Keys(_Keys):
    """runtime/precision_config.py DeepSpeedBF16Config."""

    check_grad_overflow: StrictBool | None = None
    immediate_grad_update: StrictBool | None = None


class CommsLoggerKeys(_Keys):
    """comm/config.py CommsLoggerConfig; DeepSpeedCommsConfig turns it on where the section is, whatever `enabled` says."""

    enabled: Literal[True]
    prof_all: StrictBool | None = None
    prof_ops: list[StrictStr] | None = None
    verbose: StrictBool | None = None
    debug: StrictBool | None = None


class FlopsProfilerKeys(_Keys):
    """profiling/config.py DeepSpeedFlopsProfilerConfig."""

    enabled: StrictBool
    profile_step: PositiveElements | None = None
    module_depth: StrictInt | None = None
    top_modules: PositiveElements | None = None
    detailed: StrictBool | None = None
    output_file: StrictStr | None = None


class AioKeys(_Keys):
    """runtime/swap_tensor/aio_config.py."""

    block_size: PositiveElements | None = None
    queue_depth: PositiveElements | None = None
    intra_op_parallelism: PositiveElements | None = None
    single_submit: StrictBool | None = None
    overlap_events: StrictBool | None = None
    use_gds: StrictBool | None = None


class DeepSpeedKeys(_Keys):
    """Every top-level key that takes effect in our engine and has no home elsewhere in the job file."""

    zero_optimization: ZeroKeys | None = None
    fp16: Fp16Keys | None = None
    bf16: Bf16Keys | None = None
    communication_data_type: Literal["fp16", "bf16", "fp32"] | None = None
    prescale_gradients: StrictBool | None = None
    gradient_predivide_factor: PositiveNumber | None = None
    steps_per_print: PositiveElements | None = None
    wall_clock_breakdown: StrictBool | None = None
    memory_breakdown: StrictBool | None = None
    dump_state: StrictBool | None = None
    comms_logger: CommsLoggerKeys | None = None
    flops_profiler: FlopsProfilerKeys | None = None
    aio: AioKeys | None = None


# Keys that the job file sets, and where. A second home could disagree with the first.
HOMES: dict[str, str] = {
    "train_batch_size": "train.train_batch_size",
    "train_micro_batch_size_per_gpu": "train.per_device_train_batch_size",
    "gradient_accumulation_steps": "train.gradient_accumulation_steps",
    "gradient_clipping": "train.max_grad_norm",
    "optimizer": "train.optimizer, train.learning_rate and their neighbours",
    "scheduler": "train.lr_scheduler_type and train.warmup_steps",
    "fp16.enabled": "train.precision",
    "bf16.enabled": "train.precision",
    "bfloat16": "train.precision",
    "torch_autocast": "train.precision",
    "data_types": "train.gradient_accumulation_dtype",
    "zero_optimization.stage": "parallel.zero_stage",
    "zero_optimization.offload_optimizer.device": "parallel.offload",
    "zero_optimization.offload_optimizer.ratio": "parallel.offload_ratio",
    "zero_optimization.offload_optimizer.nvme_path": "cluster.nvme_path",
    "zero_optimization.offload_param.device": "parallel.offload",
    "zero_optimization.offload_param.nvme_path": "cluster.nvme_path",
    "activation_checkpointing": "train.gradient_checkpointing and parallel.offload: activations-cpu",
    "tensor_parallel": "parallel.tensor",
    "pipeline": "parallel.pipeline",
    "tensorboard": "train.report_to",
    "checkpoint": "train.save_steps; the toolkit checks tags and checksums itself",
    "compile": "train.torch_compile",
}

# runtime/config.py _REMOVED_TOP_LEVEL_CONFIG_KEYS and _REMOVED_ZERO_CONFIG_KEYS: refused even when disabled.
REMOVED: dict[str, str] = {
    "elasticity": "Remove it: a run keeps the number of ranks that it started with",
    "amp": "Set train.precision",
    "nebula": "Checkpoints are written by the toolkit",
    "compression_training": "Remove it",
    "quantize_training": "Remove it",
    "sparse_gradients": "Remove it",
    "eigenvalue": "Remove it",
    "sparse_attention": "Set train.attention",
    "graph_harvesting": "Remove it",
    "curriculum_learning": "Order the data before training",
    "progressive_layer_drop": "Remove it",
    "zero_optimization.mics_shard_size": "Use zero_hpz_partition_size",
    "zero_optimization.mics_hierarchical_params_gather": "Use zero_hpz_partition_size",
    "zero_optimization.zeropp_loco_param": "Use zero_quantized_gradients alone",
}


def schema_paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Gives the dotted paths of all keys of a schema, sections included."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        for member in getattr(field.annotation, "__args__", ()):
            if isinstance(member, type) and issubclass(member, BaseModel):
                yield from schema_paths(member, f"{prefix}{name}.")


def leaf_values(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Gives the values of a configuration that are no sections, each with its dotted path."""
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from leaf_values(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
