"""The keys that a person's own DeepSpeed file may hold: all of DeepSpeed's, told apart by what they do to memory.

Where a job's `deepspeed` section refuses a key because the job file is its home, a file of one's own may have it.
Sources: deepspeed 0.19.8 runtime/config.py, runtime/zero/config.py, runtime/zero/offload_config.py,
runtime/precision_config.py; transformers integrations/deepspeed.py HfTrainerDeepSpeedConfig.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr

from toolkit.deepspeed_spec.schema import (
    Bf16Keys,
    DeepSpeedKeys,
    Fp16Keys,
    Number,
    OffloadOptimizerKeys,
    OffloadParamKeys,
    PositiveElements,
    ZeroKeys,
)

Device = Literal["none", "cpu", "nvme"]
Dtype = Literal["fp32", "fp16", "bf16"]
Share = Annotated[float, Field(ge=0, le=1, strict=True)]


class _OffloadOptimizer(OffloadOptimizerKeys):
    device: Device = "none"
    nvme_path: StrictStr | None = None
    ratio: Share | None = None
    super_offload: StrictBool | None = None
    cpuadam_cores_perc: Share | None = None


class _OffloadParam(OffloadParamKeys):
    device: Device = "none"
    nvme_path: StrictStr | None = None


class _Zero(ZeroKeys):
    stage: Literal[0, 1, 2, 3] = 0
    offload_optimizer: _OffloadOptimizer | None = None
    offload_param: _OffloadParam | None = None
    zero_quantized_nontrainable_weights: StrictBool | None = None
    stage3_use_all_reduce_for_fetch_params: StrictBool | None = None
    stage3_model_persistence_threshold: PositiveElements | None = None
    zenflow: Any = None
    # No effect on memory.
    use_multi_rank_bucket_allreduce: Any = None
    allgather_partitions: Any = None
    compute_grad_norm: Any = None
    load_from_fp32_weights: Any = None
    elastic_checkpoint: Any = None
    stage3_gather_16bit_weights_on_model_save: Any = None
    stage3_gather_fp16_weights_on_model_save: Any = None
    ignore_unused_parameters: Any = None
    legacy_stage1: Any = None
    parameter_alignment: Any = None
    pipeline_loading_checkpoint: Any = None
    override_module_apply: Any = None
    save_muon_momentum_buffer_in_memory: Any = None
    leaf_module: Any = None


class _Fp16(Fp16Keys):
    enabled: StrictBool | None = None
    auto_cast: StrictBool | None = None
    fp16_master_weights_and_grads: StrictBool | None = None


class _Bf16(Bf16Keys):
    enabled: StrictBool | None = None
    bf16_master_weights_and_grads: StrictBool | None = None
    bf16_optimizer_states: StrictBool | None = None


class _Optimizer(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: StrictStr
    params: dict[str, Any] = Field(default_factory=dict)
    legacy_fusion: StrictBool | None = None


class _DataTypes(BaseModel):
    model_config = ConfigDict(extra="forbid")

    grad_accum_dtype: Dtype | None = None
    param_dtype: Dtype | None = None
    buffer_dtype: Dtype | None = None
    keep_in_fp32_modules: Any = None


class FileKeys(DeepSpeedKeys):
    """Every top-level key of a file."""

    train_batch_size: PositiveElements | None = None
    train_micro_batch_size_per_gpu: PositiveElements | None = None
    gradient_accumulation_steps: PositiveElements | None = None
    gradient_clipping: Number | None = None
    zero_optimization: _Zero | None = None
    fp16: _Fp16 | None = None
    bf16: _Bf16 | None = None
    optimizer: _Optimizer | None = None
    data_types: _DataTypes | None = None
    torch_autocast: Any = None
    tensor_parallel: Any = None
    hybrid_engine: Any = None
    expert_parallel: Any = None
    weight_quantization: Any = None
    compile: Any = None
    # No effect on memory; activation_checkpointing is for models that call DeepSpeed's own function, none of Hugging Face's.
    scheduler: Any = None
    activation_checkpointing: Any = None
    pipeline: Any = None
    checkpoint: Any = None
    tensorboard: Any = None
    wandb: Any = None
    comet: Any = None
    csv_monitor: Any = None
    autotuning: Any = None
    timers: Any = None
    data_efficiency: Any = None
    zero_allow_untested_optimizer: Any = None
    zero_force_ds_cpu_optimizer: Any = None
    managed_gradient_accumulation: Any = None
    gradient_allreduce_op: Any = None
    disable_allgather: Any = None
    disable_python_gc: Any = None
    dataloader_drop_last: Any = None
    log_level: Any = None
    use_data_before_expert_parallelism: Any = None
    seq_parallel_communication_data_type: Any = None
    vocabulary_size: Any = None


# What Trainer fills in (trainer_config_process, trainer_config_finalize).
TRAINER_AUTO = frozenset(
    {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "fp16.enabled",
        "bf16.enabled",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.stage3_prefetch_bucket_size",
        "zero_optimization.stage3_param_persistence_threshold",
        *(f"optimizer.params.{name}" for name in ("lr", "betas", "eps", "weight_decay")),
        *(
            f"scheduler.params.{name}"
            for name in ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
        ),
    }
)
# "auto" is DeepSpeed's own word here, or Accelerate fills it, and memory does not depend on it.
OTHER_AUTO = ("data_types.keep_in_fp32_modules", "zero_optimization.stage3_gather_16bit_weights_on_model_save")

PRICED_OPTIMIZERS = ("Adam", "AdamW", "Lion", "SGD")

# Features that change memory in a way that the ledger does not have: by path, when they are on.
UNPRICED: Mapping[str, Callable[[Any], bool]] = {
    "torch_autocast.enabled": bool,
    "tensor_parallel.autotp_size": lambda value: value not in (0, 1),
    "hybrid_engine.enabled": bool,
    "expert_parallel.enabled": bool,
    "weight_quantization": bool,
    "compile.deepcompile": bool,
    "zero_optimization.zenflow": bool,
    "zero_optimization.offload_optimizer.super_offload": bool,
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": bool,
    "zero_optimization.zero_quantized_nontrainable_weights": bool,
    "zero_optimization.stage3_model_persistence_threshold": lambda value: True,
    "bf16.bf16_optimizer_states": bool,
    "data_types.param_dtype": bool,
    "optimizer.type": lambda value: str(value).lower() not in {name.lower() for name in PRICED_OPTIMIZERS},
}

# Fields that DeepSpeed takes under their alias, too (zero/config.py, populate_by_name).
ALIASED = (
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "model_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
    "gather_16bit_weights_on_model_save",
    "module_granularity_threshold",
    "use_all_reduce_for_fetch_params",
    "allgather_sequential",
)
