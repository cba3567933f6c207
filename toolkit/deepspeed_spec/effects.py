"""Keys that DeepSpeed accepts and that have no effect in a given run, each with the reason.

Source: deepspeed 0.19.8 runtime/engine.py _configure_zero_optimizer and what it builds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from toolkit.deepspeed_spec.facts import EngineFacts, OffloadDevice
from toolkit.deepspeed_spec.findings import Finding, ineffective
from toolkit.deepspeed_spec.nested import has_path, lookup, subsection
from toolkit.deepspeed_spec.schema import is_default

_SOURCE = "deepspeed runtime/engine.py _configure_zero_optimizer"

# ZeRO stages whose optimizer reads the key; stage 3 alone reads the rest.
_STAGES: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "overlap_comm"), (1, 2, 3)),
    **dict.fromkeys(("offload_optimizer", "zenflow", "load_from_fp32_weights"), (1, 2, 3)),
    **dict.fromkeys(("allgather_bucket_size", "round_robin_gradients", "use_multi_rank_bucket_allreduce"), (1, 2)),
    **dict.fromkeys(
        ("ignore_unused_parameters", "parameter_alignment", "compute_grad_norm", "elastic_checkpoint"), (1, 2)
    ),
}
# Keys that have an effect at every stage.
_ALL_STAGES = ("stage", "legacy_stage1")

# Swap buffers exist for NVMe only (stage3.py _configure_tensor_swapping, swap_tensor/partitioned_param_swapper.py).
_NVME_KEYS = {
    "offload_optimizer": ("buffer_count", "pipeline_read", "pipeline_write", "fast_init", "nvme_path"),
    "offload_param": ("buffer_count", "buffer_size", "max_in_cpu", "nvme_path"),
}

# Read by the dynamic loss scaler alone (fp16/loss_scaler.py).
_DYNAMIC_SCALE_KEYS = (
    "initial_scale_power",
    "loss_scale_window",
    "hysteresis",
    "consecutive_hysteresis",
    "min_loss_scale",
)

# Keys that nothing reads in any run of a Hugging Face model, and why.
NEVER_READ: Mapping[str, str] = {
    "activation_checkpointing": "a model that does not call deepspeed.checkpointing.checkpoint, and none of Hugging Face's does",
    "pipeline": "a model that is not a DeepSpeed PipelineModule",
    "disable_allgather": "this DeepSpeed, which never reads it",
    "vocabulary_size": "this DeepSpeed, which only warns of some sizes",
    "zero_optimization.allgather_partitions": "this DeepSpeed, which never reads it",
}


def ineffective_keys(config: Mapping[str, Any], facts: EngineFacts) -> Iterator[Finding]:
    """Yield the keys that have no effect.

    Args:
        config: Configuration that `read_config` returned.
        facts: Facts about the run.
    """
    for said, because, fix in _ineffective(config, facts):
        path, equals, value = said.partition("=")
        if not facts.is_job and not equals and is_default(path, lookup(config, path)):
            continue  # a file often states the default
        fix = f"{fix}, or remove it" if fix else "Remove it"
        yield ineffective(path, because, fix, value=equals + value, source=_SOURCE)


def _ineffective(config: Mapping[str, Any], facts: EngineFacts) -> Iterator[tuple[str, str, str]]:
    yield from _of_zero(subsection(config, "zero_optimization"), facts)
    yield from _of_precision(config, facts)
    if config.get("prescale_gradients") is True and "gradient_predivide_factor" in config:
        yield "gradient_predivide_factor", "prescale_gradients=true", "Set prescale_gradients to false"
    if "aio" in config and "nvme" not in (facts.optimizer_device, facts.parameter_device):
        yield "aio", facts.offload_words, "Set parallel.offload to optimizer-nvme or full-nvme"
    if subsection(config, "comms_logger").get("enabled") is False:
        yield "comms_logger.enabled=false", "a section comms_logger, which by itself turns the logger on", ""
    profiler = subsection(config, "flops_profiler")
    if profiler and "enabled" not in profiler:
        yield "flops_profiler", "enabled left out, which is false", "Set flops_profiler.enabled"
    for path, because in NEVER_READ.items():
        if has_path(config, path):
            yield path, because, ""


def _of_precision(config: Mapping[str, Any], facts: EngineFacts) -> Iterator[tuple[str, str, str]]:
    fp16, bf16 = subsection(config, "fp16"), subsection(config, "bf16")
    for dtype, section in (("fp16", fp16), ("bf16", bf16)):
        # A section with `enabled` states itself whether it is used.
        if section and "enabled" not in section and facts.dtype not in (dtype, None):
            yield dtype, facts.precision_words, f"Set train.precision to {dtype}"
    if facts.dtype == "fp16" and fp16.get("loss_scale"):
        for key in _DYNAMIC_SCALE_KEYS:
            if key in fp16:
                yield (
                    f"fp16.{key}",
                    f"loss_scale={fp16['loss_scale']:g}",
                    "Set fp16.loss_scale to 0, which scales dynamically",
                )
    if facts.dtype != "bf16" or facts.uses_bf16_optimizer is None:
        return
    if "check_grad_overflow" in bf16 and (facts.zero_stage not in (1, 2) or facts.uses_bf16_optimizer):
        yield "bf16.check_grad_overflow", _optimizer_of(facts), "Set parallel.zero_stage to 2"
    if "immediate_grad_update" in bf16 and not facts.uses_bf16_optimizer:
        yield (
            "bf16.immediate_grad_update",
            _optimizer_of(facts),
            "Set parallel.zero_stage to 1 and train.gradient_accumulation_dtype to fp32",
        )


def _of_zero(zero: Mapping[str, Any], facts: EngineFacts) -> Iterator[tuple[str, str, str]]:
    devices: dict[str, OffloadDevice] = {
        "offload_optimizer": facts.optimizer_device,
        "offload_param": facts.parameter_device,
    }
    for key, value in zero.items():
        path = f"zero_optimization.{key}"
        if key in _ALL_STAGES or path in NEVER_READ:
            continue
        yield from _of_zero_key(key, value, zero, facts, devices)
    if facts.zero_stage == 3 and zero.get("reduce_scatter") is False and zero.get("contiguous_gradients") is False:
        yield (
            "zero_optimization.reduce_scatter=false",
            "contiguous_gradients=false, without which stage 3 always scatters",
            "Set contiguous_gradients to true",
        )
    if zero.get("stage3_allgather_sequential") is True and "stage3_prefetch_bucket_size" in zero:
        yield (
            "zero_optimization.stage3_prefetch_bucket_size",
            "stage3_allgather_sequential=true, which sets it to 1",
            "Set stage3_allgather_sequential to false",
        )


def _of_zero_key(
    key: str, value: Any, zero: Mapping[str, Any], facts: EngineFacts, devices: Mapping[str, OffloadDevice]
) -> Iterator[tuple[str, str, str]]:
    path, stage = f"zero_optimization.{key}", facts.zero_stage
    stages = _STAGES.get(key, (3,))
    if key in devices and devices[key] is None:
        yield path, facts.offload_words, "Choose a parallel.offload profile"
    elif stage not in stages:
        swapped = ", where DeepSpeed swaps in its CPU optimizer and moves nothing" if key == "offload_optimizer" else ""
        yield (
            path,
            f"zero_stage={stage}{swapped or _readers(stages)}",
            f"Set parallel.zero_stage to {' or '.join(map(str, stages))}",
        )
    elif facts.uses_bf16_optimizer and key != "allgather_bucket_size":
        yield path, _optimizer_of(facts), "Set parallel.zero_stage to 2"
    elif key == "contiguous_gradients" and value is False and facts.optimizer_device and stage < 3:
        yield f"{path}=false", f"{facts.offload_words}, which turns it on", "Set parallel.offload to none"
    if key in devices and devices[key] == "cpu":
        for name in _NVME_KEYS[key]:
            if name in zero[key]:
                yield f"{path}.{name}", facts.offload_words, "Set parallel.offload to full-nvme"


def _readers(stages: tuple[int, ...]) -> str:
    said = "stage {} reads" if len(stages) == 1 else "stages {} read"
    return f": only {said.format(' and '.join(map(str, stages)))} it"


def _optimizer_of(facts: EngineFacts) -> str:
    said = f"zero_stage={facts.zero_stage} and {facts.accumulation_words}"
    return f"{said}: DeepSpeed's BF16_Optimizer does not read it" if facts.uses_bf16_optimizer else said
