"""Which class DeepSpeed wraps around an optimizer."""

from __future__ import annotations

from typing import Literal

# `none`: the bare optimizer, with neither master copies nor a gradient norm; `16-bit`: whole master copies; `bf16`:
# BF16_Optimizer, which partitions them and has no buckets; `zero`: the optimizer of the ZeRO stage.
Wrapper = Literal["none", "16-bit", "bf16", "zero"]


def optimizer_wrapper(
    *, zero_stage: int, dtype: str | None, accumulation_dtype: str | None, offloaded: bool
) -> Wrapper:
    """Return the wrapper of an engine's optimizer.

    Args:
        zero_stage: ZeRO stage, 0 to 3.
        dtype: Training precision: bf16, fp16 or fp32.
        accumulation_dtype: Precision in which the engine accumulates gradients.
        offloaded: Whether the optimizer's state is offloaded.

    Source:
        deepspeed 0.19.8 runtime/engine.py _do_optimizer_sanity_check.
    """
    if zero_stage == 0:
        return "none" if dtype == "fp32" else "16-bit"
    bf16 = zero_stage == 1 and dtype == "bf16" and accumulation_dtype == "fp32" and not offloaded
    return "bf16" if bf16 else "zero"
