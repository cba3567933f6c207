"""The sections that DeepSpeed checks itself, `zero_optimization` apart, as DeepSpeed types them.

Sources: deepspeed 0.19.8 runtime/precision_config.py, comm/config.py, monitor/config.py, compile/config.py,
runtime/config.py HybridEngineConfig, runtime/tensor_parallel/config.py, inference/config.py WeightQuantConfig,
utils/config.py.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from toolkit.deepspeed_spec.fields import PositiveCount, Section


def _loss_scale(value: Any) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):  # a whole number may be larger than any float
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise ValueError("Input should be a number of at least 0; 0 scales dynamically")
    return number


def _scale_limit(value: Any) -> Any:
    try:
        if isinstance(value, bool):
            raise TypeError
        int(value)  # pydantic converts it afterwards
    except (TypeError, ValueError, OverflowError):
        raise ValueError("Input should be a whole number") from None
    return value


ScaleLimit = Annotated[int, BeforeValidator(_scale_limit)]


class Fp16(Section):
    """Training in fp16 and its loss scale, dynamic where `loss_scale` is 0."""

    enabled: bool = False
    auto_cast: bool = False
    loss_scale: Annotated[float, BeforeValidator(_loss_scale)] = 0
    initial_scale_power: int = 16
    loss_scale_window: ScaleLimit = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: ScaleLimit = 1
    fp16_master_weights_and_grads: bool = False


class Bf16(Section):
    """Training in bf16."""

    enabled: bool = False
    immediate_grad_update: bool = False
    check_grad_overflow: bool = True
    bf16_master_weights_and_grads: bool = False
    bf16_optimizer_states: bool = False


class CommsLogger(Section):
    """The logger of collectives; DeepSpeed turns it on wherever the section exists, whatever `enabled` says."""

    enabled: bool = False
    prof_all: bool = True
    prof_ops: list[Any] = Field(default_factory=list)
    verbose: bool = False
    debug: bool = False


class TensorBoard(Section):
    """DeepSpeed's own event files."""

    enabled: bool = False
    output_path: str = ""
    job_name: str = "DeepSpeedJobName"


class Wandb(Section):
    """DeepSpeed's own Weights & Biases run."""

    enabled: bool = False
    group: str | None = None
    team: str | None = None
    project: str = "deepspeed"


class CsvMonitor(Section):
    """DeepSpeed's own CSV files."""

    enabled: bool = False
    output_path: str = ""
    job_name: str = "DeepSpeedJobName"


class Comet(Section):
    """DeepSpeed's own Comet experiment."""

    enabled: bool = False
    samples_log_interval: int = 100
    project: str | None = None
    workspace: str | None = None
    api_key: str | None = None
    experiment_name: str | None = None
    experiment_key: str | None = None
    online: bool | None = None
    mode: str | None = None


class Compile(Section):
    """DeepCompile; this section no longer says how torch.compile is called."""

    deepcompile: bool = False
    autoep_non_moe: bool = False
    free_activation: bool = False
    free_activation_threshold: int = 10 * 1024 * 1024
    offload_activation: bool = False
    offload_activation_pin_memory: bool = True
    offload_opt_states: bool = False
    double_buffer: bool = True
    symmetric_memory: bool = False
    debug_log: bool = False
    offload_parameters: bool = False
    sync_before_reduce: bool = False
    sync_after_reduce: bool = False
    sync_before_allgather: bool = False
    sync_after_allgather: bool = False
    keep_int_input_tensors: bool = True
    keep_all_input_tensors: bool = False
    passes: list[Literal["z1", "z3", "autosp", "autotp"]] | None = None


class HybridEngine(Section):
    """DeepSpeed's engine for alternating training and generation."""

    enabled: bool = False
    max_out_tokens: PositiveCount = 512
    inference_tp_size: int = 1
    release_inference_cache: bool = False
    pin_parameters: bool = True
    tp_gather_partition_size: int = 8
    enable_cuda_graph: bool = False


def _refuse(value: Any) -> Any:
    raise ValueError("Input should be a torch.dtype, which a file cannot contain: leave the key out")


class TensorParallelGroup(Section):
    """Options of AutoTP's parser other than the size."""

    tp_size: int = 1
    tp_grain_size: int = 1
    mpu: Any = None
    tp_group: Any = None


class TensorParallel(Section):
    """DeepSpeed's automatic tensor parallelism."""

    dtype: Annotated[Any, BeforeValidator(_refuse)] = None
    autotp_size: int = 0
    tp_overlap_comm: bool = False
    vocab_parallel_lm_head: bool | None = None
    vocab_parallel_ce_backend: Literal["torch", "liger"] = "torch"
    tensor_parallel: TensorParallelGroup = Field(default_factory=TensorParallelGroup, alias="tp")
    injection_policy_tuple: tuple[Any, ...] | None = None
    partition_config: dict[str, Any] | None = None
    preset_model: str | None = None
    keep_module_on_host: bool = False
    replace_with_kernel_inject: bool = Field(default=False, alias="kernel_inject")


class WeightQuantization(Section):
    """Quantization of inference weights to 4 or 8 bits."""

    enabled: bool = True
    num_bits: int = 8
    q_type: Literal["asymmetric", "symmetric"] = "symmetric"
    q_groups: int = 1
    quantized_initialization: dict[Any, Any] = Field(default_factory=dict)
    post_init_quant: dict[Any, Any] = Field(default_factory=dict)


class ThroughputTimer(Section):
    """The timer of the samples per second that DeepSpeed logs."""

    enabled: bool = True
    synchronized: bool = True
