"""The section `zero_optimization`, as DeepSpeed types it.

Sources: deepspeed 0.19.8 runtime/zero/config.py DeepSpeedZeroConfig, runtime/zero/offload_config.py,
runtime/zero/leaf_module_config.py, runtime/zenflow/zenflow_config.py.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from enum import IntEnum
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from toolkit.deepspeed_spec.fields import Count, FolderPath, PositiveCount, Section, Share, is_auto


class _Stage(IntEnum):
    DISABLED = 0
    OPTIMIZER_STATES = 1
    GRADIENTS = 2
    WEIGHTS = 3


Device = Literal["none", "cpu", "nvme"]


class OffloadParam(Section):
    """Device of the partitions of stage 3's parameters."""

    device: Device = "none"
    nvme_path: FolderPath | None = None
    buffer_count: Count = 5
    buffer_size: Count = 100_000_000
    max_in_cpu: Count = 1_000_000_000
    pin_memory: bool = True


class OffloadOptimizer(Section):
    """Device of the optimizer's state and of its step."""

    device: Device = "none"
    nvme_path: FolderPath | None = None
    buffer_count: Count = 4
    pin_memory: bool = True
    pipeline_read: bool = False
    pipeline_write: bool = False
    fast_init: bool = False
    ratio: Share = 1.0
    super_offload: bool = False
    cpuadam_cores_perc: Share = 0.8


def _no_word(value: str | int) -> str | int:
    if isinstance(value, str):  # "auto" has been removed before
        raise ValueError('Input should be "auto" or a whole number')
    return value


def _interval(value: str | int) -> str | int:
    if isinstance(value, int) and value < 1:
        raise ValueError('Input should be "auto" or at least 1')
    return _no_word(value)


class ZenFlow(Section):
    """Updates by the important gradients first, by the others asynchronously on the CPU."""

    topk_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.1
    select_strategy: Literal["auto", "step", "epoch"] = "auto"
    select_interval: Annotated[str | int, AfterValidator(_no_word)] = "auto"
    update_interval: Annotated[str | int, AfterValidator(_interval)] = "auto"
    overlap_step: bool = False
    offload: bool = False
    auto_ratio: Share = 0.99
    full_warm_up_rounds: int = 0
    pt_reserved_cores_perc: Share = 0.5
    steps_per_epoch: int | None = None


class LeafModules(Section):
    """Modules whose parameters stage 3 fetches together; a single name is read as a list of one."""

    classes: list[str] = Field(
        default_factory=lambda: [
            "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
            "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
            "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
        ]
    )
    names: list[str] = Field(default_factory=list)
    name_suffixes: list[str] = Field(default_factory=list)

    @model_validator(mode="before")
    @classmethod
    def _lists(cls, values: Any) -> Any:
        if values is None:
            return {}
        if not isinstance(values, Mapping):
            return values
        lists = {name: [each] for name, each in values.items() if isinstance(each, str) and not is_auto(each)}
        return {**values, **{name: each for name, each in lists.items() if name in cls.model_fields}}


class Zero(Section):
    """ZeRO, its buffers and its offload. Keys with two names have the shorter here, and the longer in a file."""

    stage: _Stage = Field(default=_Stage.DISABLED, validate_default=True)
    contiguous_gradients: bool = True
    reduce_scatter: bool = True
    reduce_bucket_size: PositiveCount = 500_000_000
    use_multi_rank_bucket_allreduce: bool = True
    allgather_partitions: bool = True
    allgather_bucket_size: Count = 500_000_000
    overlap_comm: bool | None = None  # left out: stage 3 overlaps, the others do not
    compute_grad_norm: bool = True
    load_from_fp32_weights: bool = True
    elastic_checkpoint: bool = False
    offload_param: OffloadParam | None = None
    offload_optimizer: OffloadOptimizer | None = None
    zenflow: ZenFlow | None = None
    sub_group_size: Count = 1_000_000_000
    cpu_offload_param: bool | None = None
    cpu_offload_use_pin_memory: bool | None = None
    cpu_offload: bool | None = None
    prefetch_bucket_size: Count = Field(default=50_000_000, alias="stage3_prefetch_bucket_size")
    param_persistence_threshold: Count = Field(default=100_000, alias="stage3_param_persistence_threshold")
    model_persistence_threshold: Count = Field(default=sys.maxsize, alias="stage3_model_persistence_threshold")
    max_live_parameters: Count = Field(default=1_000_000_000, alias="stage3_max_live_parameters")
    max_reuse_distance: Count = Field(default=1_000_000_000, alias="stage3_max_reuse_distance")
    gather_16bit_weights_on_model_save: bool = Field(default=False, alias="stage3_gather_16bit_weights_on_model_save")
    module_granularity_threshold: int = Field(default=0, alias="stage3_module_granularity_threshold")
    use_all_reduce_for_fetch_params: bool = Field(default=False, alias="stage3_use_all_reduce_for_fetch_params")
    allgather_sequential: bool = Field(default=False, alias="stage3_allgather_sequential")
    stage3_gather_fp16_weights_on_model_save: bool = False
    ignore_unused_parameters: bool = True
    legacy_stage1: bool = False
    round_robin_gradients: bool = False
    parameter_alignment: bool = False
    zero_hpz_partition_size: Count = 1
    zero_quantized_weights: bool = False
    zero_quantized_nontrainable_weights: bool = False
    zero_quantized_gradients: bool = False
    memory_efficient_linear: bool = True
    pipeline_loading_checkpoint: bool = False
    override_module_apply: bool = True
    log_trace_cache_warnings: bool = False
    enable_sanity_checks: bool = False
    save_muon_momentum_buffer_in_memory: bool = False
    leaf_module: LeafModules = Field(default_factory=LeafModules)
