"""The sections whose keys DeepSpeed looks up one by one, with the types that its engine works with.

Sources: deepspeed 0.19.8 runtime/config.py, profiling/config.py, autotuning/config.py, runtime/data_pipeline/config.py,
runtime/swap_tensor/aio_config.py, runtime/model_checkpointing/config.py, runtime/activation_checkpointing/config.py,
module_inject/auto_ep_config.py, utils/config.py.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from toolkit.deepspeed_spec.fields import (
    Dtype,
    Either,
    Filled,
    Index,
    LooseSection,
    Number,
    Switch,
    Text,
    Truth,
    known_dtype,
    one_of,
    or_none,
    python_int,
)
from toolkit.deepspeed_spec.sections import ThroughputTimer


class Optimizer(LooseSection):
    """The optimizer that DeepSpeed builds; its parameters go to the optimizer's class."""

    type: str | None = None
    params: dict[str, Any] | None = None
    legacy_fusion: Truth = False


class Scheduler(LooseSection):
    """The learning-rate schedule that DeepSpeed builds; its parameters go to the schedule's class."""

    type: str | None = None
    params: dict[str, Any] = Field(default_factory=dict)


class ActivationCheckpointing(LooseSection):
    """Settings of `deepspeed.checkpointing.checkpoint`, for models that call it."""

    partition_activations: Truth = False
    contiguous_memory_optimization: Truth = False
    cpu_checkpointing: Truth = False
    number_checkpoints: Any = None
    synchronize_checkpoint_boundary: Truth = False
    profile: Truth = False


class DataTypes(LooseSection):
    """Types in which gradients accumulate, and in which weights and buffers are kept."""

    grad_accum_dtype: Dtype | None = None
    param_dtype: Dtype | None = None
    buffer_dtype: Dtype | None = None
    keep_in_fp32_modules: Annotated[str | list[str], Field(union_mode="left_to_right")] = "auto"

    @model_validator(mode="after")
    def _patterns(self) -> DataTypes:
        if isinstance(self.keep_in_fp32_modules, str) and self.keep_in_fp32_modules != "auto":
            raise ValueError('keep_in_fp32_modules should be "auto" or a list of name patterns')
        return self


def _module_names(value: Any) -> Any:
    if not isinstance(value, str | list | dict) or not all(isinstance(name, str) for name in value):
        raise ValueError("Input should be a list of module names")
    return list(value)


class TorchAutocast(LooseSection):
    """torch.autocast around the forward pass."""

    enabled: Truth = False
    dtype: Annotated[str | None, known_dtype] = None
    lower_precision_safe_modules: Annotated[list[str] | None, BeforeValidator(_module_names)] = None


class FlopsProfiler(LooseSection):
    """DeepSpeed's count of the operations of one forward pass."""

    enabled: Switch = False
    recompute_fwd_factor: Number = 0.0
    profile_step: Number = 1
    module_depth: Index = -1
    top_modules: Index = 1
    detailed: Truth = True
    output_file: Annotated[str | None, or_none] = None


class Aio(LooseSection):
    """How the swap files of NVMe offload are read and written."""

    block_size: Index = 1048576
    queue_depth: Index = 8
    intra_op_parallelism: Index = 1
    single_submit: Truth = False
    overlap_events: Truth = True
    use_gds: Truth = False


class Pipeline(LooseSection):
    """Settings of DeepSpeed's own pipeline engine."""

    stages: Any = "auto"
    partition: Any = "best"
    seed_layers: Any = False
    activation_checkpoint_interval: Any = 0
    pipe_partitioned: Any = True
    grad_partitioned: Any = True
    use_reentrant: Any = None


class ParallelWrite(LooseSection):
    """The switch for stages of a pipeline that write their checkpoints in parallel."""

    pipeline_stage: Either = False


class CheckpointWriter(LooseSection):
    """DeepSpeed's FastPersist writer."""

    type: Annotated[str, one_of("MOCK", "PYTHON", "FAST")] | None = "FAST"
    io_buffer_size: Any = 64 * 1024**2
    io_buffer_double: Any = True
    show_statistics: Any = False
    data_parallel: Annotated[str, one_of("REPLICA", "SOCKET", "MACHINE")] | None = None
    decoupled: Any = False
    io_multiplier: Any = 1


class Checkpoint(LooseSection):
    """How DeepSpeed writes checkpoints."""

    tag_validation: Annotated[str, one_of("WARN", "IGNORE", "FAIL")] = "WARN"
    load_universal: Truth = False
    use_node_local_storage: Truth = False
    parallel_write: ParallelWrite = Field(default_factory=ParallelWrite)
    checkpoint_serialization: Any = True
    writer: CheckpointWriter | None = None


class ModelInfo(LooseSection):
    """Figures of the model that the autotuner would otherwise measure."""

    profile: Any = False
    num_params: Any = None
    hidden_size: Any = None
    num_layers: Any = None


class Autotuning(LooseSection):
    """DeepSpeed's autotuner, which `deepspeed --autotuning` starts."""

    enabled: Any = False
    fast: Any = True
    results_dir: Filled = "autotuning_results"
    exps_dir: Filled = "autotuning_exps"
    overwrite: Any = True
    start_profile_step: Any = 3
    end_profile_step: Any = 5
    metric: Any = "throughput"
    metric_path: Any = None
    tuner_type: Any = "gridsearch"
    tuner_early_stopping: Any = 5
    tuner_num_trials: Any = 50
    arg_mappings: Any = None
    model_info: ModelInfo | None = None
    model_info_path: Any = None
    mp_size: Any = 1
    max_train_batch_size: Any = None
    min_train_batch_size: Any = 1
    max_train_micro_batch_size_per_gpu: Any = 1024
    min_train_micro_batch_size_per_gpu: Any = 1
    num_tuning_micro_batch_sizes: Any = 3


class DynamicBatching(LooseSection):
    """Batches of about as many tokens each."""

    enabled: Truth = False
    metrics_path: Any = None
    lr_scaling_method: Text = "linear"
    min_batch_size: Annotated[int, python_int] = 1
    max_batch_size: Annotated[int | None, python_int] = None
    sequence_picking_order: Text = "dataloader"
    max_tokens: Any = None
    verbose: Truth = False

    @model_validator(mode="after")
    def _limit(self) -> DynamicBatching:
        if self.enabled:
            try:
                int(self.max_tokens)
            except (TypeError, ValueError, OverflowError):
                raise ValueError("max_tokens should be a whole number where dynamic batching is enabled") from None
        return self


class DataSampling(LooseSection):
    """DeepSpeed's own sampler, for its own data loader."""

    enabled: Truth = False
    num_epochs: Any = 1000
    num_workers: Any = 0
    pin_memory: Any = False
    curriculum_learning: dict[str, Any] = Field(default_factory=dict)
    dynamic_batching: DynamicBatching = Field(default_factory=DynamicBatching)

    @model_validator(mode="after")
    def _metrics(self) -> DataSampling:
        if self.curriculum_learning.get("enabled") and "curriculum_metrics" not in self.curriculum_learning:
            raise ValueError("curriculum_learning should have curriculum_metrics where it is enabled")
        return self


class DataRouting(LooseSection):
    """Layers that process only part of the tokens."""

    enabled: Truth = False
    random_ltd: dict[str, Any] = Field(default_factory=dict)


class DataEfficiency(LooseSection):
    """DeepSpeed's data pipeline."""

    enabled: Truth = False
    seed: Any = 1234
    data_sampling: DataSampling = Field(default_factory=DataSampling)
    data_routing: DataRouting = Field(default_factory=DataRouting)


class Timers(LooseSection):
    """DeepSpeed's timers."""

    throughput: ThroughputTimer = Field(default_factory=ThroughputTimer)

    @model_validator(mode="before")
    @classmethod
    def _without_it(cls, values: Any) -> Any:
        # `"throughput" in timers` is also evaluated for a list or a string (utils/config.py get_timers_config).
        return {} if isinstance(values, str | list) and "throughput" not in values else values


class ExpertParallel(LooseSection):
    """DeepSpeed's automatic expert parallelism; the engine checks the rest of the section where it is enabled."""

    enabled: Truth = False
    autoep_size: Any = 1
    expert_tensor_parallel_size: Any = 1
    validate_folding_routing: Any = False
    async_split_plan: Any = False
    preset_model: Any = None
    moe_layer_pattern: Any = None
    expert_pattern: Any = None
    router_pattern: Any = None
    use_grouped_mm: Any = True
    disable_triton_grouped_mm: Any = False
    route_norm: Any = None
    route_scale: Any = 1.0
    score_apply: Any = "auto"
    combine_impl: Any = "auto"
    row_weighting_impl: Any = "auto"
    gate_up_impl: Any = "separate"
    comm_backend: Any = "comm"
    comm_num_sm: Any = 12
    comm_qp_margin: Any = 4
    comm_max_tokens_per_rank: Any = 0
    num_expert_groups: Any = None
    num_limited_groups: Any = None
    score_func: Any = "auto"
    top_k: Any = "auto"
    load_balance_coeff: None = None
    routed_scaling_factor: Any = "auto"
    expert_w1: Any = None
    expert_w2: Any = None
    expert_w3: Any = None
    num_experts_attr: Any = None
    top_k_attr: Any = None
    has_shared_experts: Any = None
    shared_experts_pattern: Any = None
    shared_experts_gate_pattern: Any = None
    expert_activation: Any = None

    @model_validator(mode="before")
    @classmethod
    def _nothing(cls, values: Any) -> Any:
        return values or {}
