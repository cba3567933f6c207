"""Facts about a run that decide which keys DeepSpeed's engine reads: all known for a job, some for a user's file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from toolkit.deepspeed_spec.schema import DeepSpeedConfig
from toolkit.deepspeed_spec.wrapper import optimizer_wrapper

OffloadDevice = Literal["cpu", "nvme"] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What an engine is built with. Checks that depend on an unknown fact, None, are skipped.

    Args:
        zero_stage: ZeRO stage, 0 to 3.
        dtype: Training precision: bf16, fp16 or fp32.
        optimizer_device: Device of the optimizer's state; None for the GPU.
        parameter_device: Device of the parameters; None for the GPU.
        uses_bf16_optimizer: Whether DeepSpeed's BF16_Optimizer steps, which has no buckets.
        num_ranks: Ranks of the whole run.
        dp_size: Data-parallel ranks.
        on_cpu: Whether the ranks are CPU processes.
        split: Sizes above 1 of the axes along which the model is split, by name.
        precision_words: Precision, in the words of messages.
        accumulation_words: Precision in which gradients accumulate, in the words of messages.
        offload_words: Offload, in the words of messages.
        is_job: Whether the keys are of a job, which may have none without effect.
    """

    zero_stage: int
    dtype: str | None
    optimizer_device: OffloadDevice
    parameter_device: OffloadDevice
    uses_bf16_optimizer: bool | None
    num_ranks: int | None = None
    dp_size: int | None = None
    on_cpu: bool | None = None
    split: Mapping[str, int] = field(default_factory=dict)
    precision_words: str
    accumulation_words: str
    offload_words: str
    is_job: bool = False

    @classmethod
    def of_config(cls, keys: DeepSpeedConfig, *, dtype: str | None) -> EngineFacts:
        """Read the facts from a user's configuration, which does not tell the ranks; `dtype` is None if it is "auto"."""
        zero = keys.zero_optimization
        optimizer, parameters = (
            None if section is None or section.device == "none" else section.device
            for section in (zero.offload_optimizer, zero.offload_param)
        )
        accumulation = keys.data_types.grad_accum_dtype or dtype
        wrapper = optimizer_wrapper(
            zero_stage=zero.stage,
            dtype=dtype or "bf16",
            accumulation_dtype=accumulation,
            offloaded=optimizer is not None,
        )
        return cls(
            zero_stage=zero.stage,
            dtype=dtype,
            optimizer_device=optimizer,
            parameter_device=parameters,
            uses_bf16_optimizer=None if wrapper == "bf16" and dtype is None else wrapper == "bf16",
            precision_words=f"precision={dtype}",
            accumulation_words=f"grad_accum_dtype={accumulation}",
            offload_words=f"offload_optimizer.device={optimizer or 'none'} and offload_param.device={parameters or 'none'}",
        )
