"""The keys of a DeepSpeed configuration that decide on memory, with DeepSpeed's own defaults where they are absent.

Source: deepspeed 0.19.8 runtime/zero/config.py, runtime/zero/offload_config.py, runtime/config.py, runtime/engine.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from toolkit.plan.optimizer_state import MOMENT_BYTES
from toolkit.spec.job import Optimizer

OptimizerKind = Literal["fused_adam", "torch_adamw", "adamw_8bit", "fused_lion", "sgd"]

# The job's optimizer that each of them is.
_NAMES: Mapping[OptimizerKind, Optimizer] = {
    "fused_adam": "adamw",
    "torch_adamw": "adamw_torch",
    "adamw_8bit": "adamw_8bit",
    "fused_lion": "lion",
    "sgd": "sgd",
}

# Bytes a parameter of the temporaries of a step: torch's foreach AdamW holds the square root of the second moments
# (torch/optim/adamw.py _multi_tensor_adamw); DeepSpeed's fused kernels hold nothing.
STEP_BYTES: Mapping[str, int] = {"fused_adam": 0, "torch_adamw": 4, "adamw_8bit": 0, "fused_lion": 0, "sgd": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What the engine's memory depends on.

    Args:
        zero_stage: 0 to 3.
        itemsize: Bytes a parameter in training precision.
        fp16: Whether that precision is fp16.
        accumulation_itemsize: Bytes of an accumulated gradient element.
        communication_itemsize: Bytes of a reduced gradient element.
        dp_size: Data-parallel ranks.
        accumulation_steps: Micro-batches an optimizer step.
        immediate_grad_update: Whether BF16_Optimizer adds each gradient to its fp32 sum as soon as it is there.
        adds_up_on_host: Whether gradients whose optimizer state is offloaded add up in host memory.
        optimizer: What steps.
        momentum: Whether SGD keeps a buffer.
        built_partitioned: Whether the model is built under `zero.Init`.
    """

    zero_stage: int
    itemsize: int
    fp16: bool
    accumulation_itemsize: int
    communication_itemsize: int
    dp_size: int
    accumulation_steps: int
    immediate_grad_update: bool
    adds_up_on_host: bool
    optimizer: OptimizerKind
    momentum: bool
    contiguous_gradients: bool
    reduce_scatter: bool
    reduce_bucket_size: int
    overlap_comm: bool
    sub_group_size: int
    prefetch_bucket_size: int
    persistence_threshold: int
    max_live_parameters: int
    max_reuse_distance: int
    allgather_sequential: bool
    hpz_partition_size: int
    quantized_weights: bool
    offload_optimizer: Literal["cpu", "nvme"] | None
    offload_ratio: float
    offload_param: Literal["cpu", "nvme"] | None
    pin_memory: bool
    pin_parameters: bool
    nvme_optimizer_buffers: int
    nvme_param_buffers: int
    nvme_param_buffer_size: int
    max_in_cpu: int
    low_precision_master: bool
    memory_efficient_linear: bool
    built_partitioned: bool

    @property
    def state_bytes(self) -> float:
        """Bytes of optimizer state a parameter, master copy apart."""
        return 0 if self.optimizer == "sgd" and not self.momentum else MOMENT_BYTES[_NAMES[self.optimizer]]

    @property
    def step_bytes(self) -> int:
        """Bytes a parameter of the step's temporaries."""
        return STEP_BYTES[self.optimizer]

    @property
    def master_itemsize(self) -> int:
        """Bytes of a master parameter and of its gradient at the step."""
        return self.itemsize if self.low_precision_master else 4

    @classmethod
    def read(cls, config: Mapping[str, Any], *, dp_size: int, built_partitioned: bool = True) -> EngineSettings:
        """Reads a DeepSpeed configuration that holds no "auto" any more.

        Args:
            config: As a JSON file has it.
            dp_size: Data-parallel ranks.
            built_partitioned: Whether a stage-3 model is built under `zero.Init`.
        """
        zero = _section(config, "zero_optimization")
        stage = int(zero.get("stage", 0))
        fp16 = bool(_section(config, "fp16").get("enabled", False))
        bf16 = bool(_section(config, "bf16").get("enabled", False))
        itemsize = 2 if fp16 or bf16 else 4
        names = {"fp32": 4, "fp16": 2, "bf16": 2}
        accumulation = _section(config, "data_types").get("grad_accum_dtype")
        communication = config.get("communication_data_type")
        optimizer = _section(config, "optimizer")
        offload_optimizer, offload_param = _section(zero, "offload_optimizer"), _section(zero, "offload_param")
        params = _section(optimizer, "params")
        overlap = zero.get("overlap_comm")
        return cls(
            zero_stage=stage,
            itemsize=itemsize,
            fp16=fp16,
            accumulation_itemsize=names[accumulation] if accumulation else itemsize,
            communication_itemsize=names[communication] if communication else itemsize,
            dp_size=dp_size,
            accumulation_steps=int(config.get("gradient_accumulation_steps", 1)),
            immediate_grad_update=bool(_section(config, "bf16").get("immediate_grad_update", False)),
            adds_up_on_host=int(config.get("gradient_accumulation_steps", 1)) > 1,
            optimizer=_optimizer_kind(optimizer),
            momentum=bool(params.get("momentum", 0.0)),
            # stage_1_and_2.py sets it under offload, whatever the file says.
            contiguous_gradients=bool(zero.get("contiguous_gradients", True))
            or (stage in (1, 2) and _device(offload_optimizer) is not None),
            reduce_scatter=bool(zero.get("reduce_scatter", True)),
            reduce_bucket_size=int(zero.get("reduce_bucket_size", 5e8)),
            overlap_comm=stage == 3 if overlap is None else bool(overlap),
            sub_group_size=int(zero.get("sub_group_size", 1e9)),
            prefetch_bucket_size=int(_either(zero, "prefetch_bucket_size", 5e7)),
            persistence_threshold=int(_either(zero, "param_persistence_threshold", 1e5)),
            max_live_parameters=int(_either(zero, "max_live_parameters", 1e9)),
            max_reuse_distance=int(_either(zero, "max_reuse_distance", 1e9)),
            allgather_sequential=bool(_either(zero, "allgather_sequential", False)),
            hpz_partition_size=int(zero.get("zero_hpz_partition_size", 1)),
            quantized_weights=bool(zero.get("zero_quantized_weights", False)),
            offload_optimizer=_device(offload_optimizer) if stage else None,
            offload_ratio=float(offload_optimizer.get("ratio", 1.0)),
            offload_param=_device(offload_param) if stage == 3 else None,
            pin_memory=bool(offload_optimizer.get("pin_memory", True)),
            pin_parameters=bool(offload_param.get("pin_memory", True)),
            nvme_optimizer_buffers=int(offload_optimizer.get("buffer_count", 4)),
            nvme_param_buffers=int(offload_param.get("buffer_count", 5)),
            nvme_param_buffer_size=int(offload_param.get("buffer_size", 1e8)),
            max_in_cpu=int(offload_param.get("max_in_cpu", 1e9)),
            low_precision_master=bool(_section(config, "bf16").get("bf16_master_weights_and_grads", False))
            or bool(_section(config, "fp16").get("fp16_master_weights_and_grads", False)),
            memory_efficient_linear=bool(zero.get("memory_efficient_linear", True)),
            built_partitioned=built_partitioned,
        )


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = config.get(name)
    return value if isinstance(value, Mapping) else {}


def _either(zero: Mapping[str, Any], name: str, default: Any) -> Any:
    """Reads a key that DeepSpeed accepts with and without the prefix `stage3_`."""
    return zero.get(f"stage3_{name}", zero.get(name, default))


def _device(section: Mapping[str, Any]) -> Any:
    device = section.get("device")
    return device if device in ("cpu", "nvme") else None


def _optimizer_kind(section: Mapping[str, Any]) -> OptimizerKind:
    """Names what runs for an optimizer section (engine.py _configure_basic_optimizer)."""
    name = str(section.get("type", "AdamW")).lower()
    if name == "lion":
        return "fused_lion"
    if name == "sgd":
        return "sgd"
    return "torch_adamw" if _section(section, "params").get("torch_adam") else "fused_adam"
