"""Keys of the job's `deepspeed` section that DeepSpeed would read and then not use, or that would stop the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from toolkit.deepspeed_spec.schema import HOMES, ZeroKeys
from toolkit.errors import Problem
from toolkit.plan.draft import Draft
from toolkit.topology.grid import divisors, join

# ZeRO stages whose optimizer takes the key (engine.py _configure_zero_optimizer); stage 3 alone takes the rest.
_STAGES: dict[str, tuple[int, ...]] = {
    "contiguous_gradients": (1, 2, 3),
    "reduce_scatter": (1, 2, 3),
    "reduce_bucket_size": (1, 2, 3),
    "overlap_comm": (1, 2, 3),
    "offload_optimizer": (1, 2, 3),
    "allgather_bucket_size": (1, 2),
    "round_robin_gradients": (1, 2),
}

# Swap buffers exist for NVMe only (stage3.py _configure_tensor_swapping, swap_tensor/partitioned_param_swapper.py).
_NVME_KEYS = {
    "offload_optimizer": ("buffer_count", "pipeline_read", "pipeline_write", "fast_init"),
    "offload_param": ("buffer_count", "buffer_size", "max_in_cpu"),
}

# Read by the dynamic loss scaler alone (fp16/loss_scaler.py).
_DYNAMIC_SCALE_KEYS = (
    "initial_scale_power",
    "loss_scale_window",
    "hysteresis",
    "consecutive_hysteresis",
    "min_loss_scale",
)

# Adam swaps its master copy, two moments and the gradient at once (swap_tensor/partitioned_optimizer_swapper.py).
_SWAPPED_TENSORS = 4


def of_effect(draft: Draft) -> Iterator[Problem]:
    """Keys that the ZeRO stage, the precision or the offload profile would ignore."""
    for path, because, fix in _without_effect(draft):
        yield Problem(
            code="DEEPSPEED_IGNORED",
            key=f"deepspeed.{path}",
            message=f"deepspeed.{path} has no effect with {because}",
            fix=f"{fix}, or remove it",
            source="deepspeed runtime/engine.py _configure_zero_optimizer",
        )


def _without_effect(draft: Draft) -> Iterator[tuple[str, str, str]]:
    section, settings = draft.job.deepspeed, draft.settings
    yield from _zero_without_effect(draft, _mapping(section, "zero_optimization"))
    for dtype in ("fp16", "bf16"):
        if dtype in section and settings.dtype != dtype:
            yield dtype, f"precision={settings.precision}", f"Set train.precision to {dtype}"
    fp16, bf16 = _mapping(section, "fp16"), _mapping(section, "bf16")
    if settings.precision == "fp16" and fp16.get("loss_scale"):
        for key in _DYNAMIC_SCALE_KEYS:
            if key in fp16:
                yield (
                    f"fp16.{key}",
                    f"loss_scale={fp16['loss_scale']}",
                    "Set fp16.loss_scale to 0, which scales dynamically",
                )
    if settings.dtype == "bf16":
        if "check_grad_overflow" in bf16 and (settings.zero_stage not in (1, 2) or draft.uses_bf16_optimizer):
            yield "bf16.check_grad_overflow", _optimizer_of(draft), "Set parallel.zero_stage to 2"
        if "immediate_grad_update" in bf16 and not draft.uses_bf16_optimizer:
            yield (
                "bf16.immediate_grad_update",
                _optimizer_of(draft),
                "Set parallel.zero_stage to 1 and train.gradient_accumulation_dtype to fp32",
            )
    if section.get("prescale_gradients") is True and "gradient_predivide_factor" in section:
        yield "gradient_predivide_factor", "prescale_gradients=true", "Set prescale_gradients to false"
    if "aio" in section and not draft.profile.needs_nvme:
        yield "aio", f"offload={draft.profile.name}", "Set parallel.offload to optimizer-nvme or full-nvme"


def _zero_without_effect(draft: Draft, zero: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    stage, profile = draft.settings.zero_stage, draft.profile
    devices = {"offload_optimizer": profile.optimizer, "offload_param": profile.parameters}
    for key, value in zero.items():
        path = f"zero_optimization.{key}"
        if path in HOMES or key not in ZeroKeys.model_fields:
            continue
        stages = _STAGES.get(key, (3,))
        if key in devices and devices[key] is None:
            yield path, f"offload={profile.name}", "Choose a parallel.offload profile"
        elif stage not in stages:
            yield path, f"zero_stage={stage}", f"Set parallel.zero_stage to {' or '.join(map(str, stages))}"
        elif draft.uses_bf16_optimizer and key != "allgather_bucket_size":
            yield path, _optimizer_of(draft), "Set parallel.zero_stage to 2"
        elif key == "contiguous_gradients" and value is False and profile.optimizer and stage < 3:
            yield f"{path}=false", f"offload={profile.name}, which turns it on", "Set parallel.offload to none"
        if key in devices and devices[key] == "cpu" and isinstance(value, Mapping):
            for name in _NVME_KEYS[key]:
                if name in value:
                    yield f"{path}.{name}", f"offload={profile.name}", "Set parallel.offload to full-nvme"
    if stage == 3 and zero.get("reduce_scatter") is False and zero.get("contiguous_gradients") is False:
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


def _optimizer_of(draft: Draft) -> str:
    settings = draft.settings
    if draft.uses_bf16_optimizer:
        return "zero_stage=1 and gradient_accumulation_dtype=fp32: DeepSpeed's BF16_Optimizer does not read it"
    return f"zero_stage={settings.zero_stage} and gradient_accumulation_dtype={settings.gradient_accumulation_dtype}"


def scaled_reduction(draft: Draft) -> Iterator[Problem]:
    """Prescaling and predivision need all-reduce: stages 2 and 3 assert it, stage 1 ignores them without it."""
    section, stage = draft.job.deepspeed, draft.settings.zero_stage
    scatter = _mapping(section, "zero_optimization").get("reduce_scatter", True)
    factor = section.get("gradient_predivide_factor", 1.0)
    predivided = isinstance(factor, int | float) and factor != 1
    scaled = section.get("prescale_gradients") is True or predivided
    if predivided and stage == 3 and factor == draft.settings.batch.dp_size:
        yield Problem(
            code="DEEPSPEED_PREDIVIDE",
            key="deepspeed.gradient_predivide_factor",
            message=(
                f"gradient_predivide_factor={factor:g} equals the number of data-parallel ranks with zero_stage=3: stage 3 then divides "
                f"by it twice, so every gradient is {factor:g} times too small"
            ),
            fix="Set it to another value, such as 1, or set parallel.zero_stage to 2",
            source="deepspeed runtime/zero/stage3.py __avg_scatter_contiguous_grads, _gradient_averaging_world_size",
        )
    if scaled and scatter is True and stage > 0 and not draft.uses_bf16_optimizer:
        yield Problem(
            code="DEEPSPEED_PRESCALE",
            key="deepspeed.prescale_gradients",
            message=(
                "prescale_gradients or gradient_predivide_factor with reduce_scatter=true: stages 2 and 3 refuse it, "
                "stage 1 ignores it"
            ),
            fix="Set deepspeed.zero_optimization.reduce_scatter to false, or remove them",
            source="deepspeed runtime/zero/stage_1_and_2.py DeepSpeedZeroOptimizer",
        )


def secondary_partition(draft: Draft) -> Iterator[Problem]:
    """The secondary partition of ZeRO++ divides the world; a larger one is cut without a word."""
    size = _mapping(draft.job.deepspeed, "zero_optimization").get("zero_hpz_partition_size")
    ranks = draft.job.cluster.num_ranks
    if isinstance(size, int) and size > 0 and ranks % size:
        yield Problem(
            code="DEEPSPEED_HPZ",
            key="deepspeed.zero_optimization.zero_hpz_partition_size",
            message=f"zero_hpz_partition_size={size} does not divide the world of {ranks} ranks",
            fix=f"Set it to one of {join(divisors(ranks))}; the cards of a node are what it is meant for",
            source="deepspeed utils/groups.py _create_zero_param_parallel_group",
        )


def groups_of_neighbours(draft: Draft) -> Iterator[Problem]:
    """hpZ and quantized gradients make groups of the world's neighbours, which may hold other shards or other layers."""
    zero, parallel = _mapping(draft.job.deepspeed, "zero_optimization"), draft.job.parallel
    sizes = {"tensor": parallel.tensor, "pipeline": parallel.pipeline}
    split = {name: size for name, size in sizes.items() if size > 1}
    shown = " and ".join(f"{name}={size}" for name, size in split.items())
    if not split:
        return
    without_groups = {"zero_hpz_partition_size": (None, 0, 1), "zero_quantized_gradients": (None, False)}
    for name, values in without_groups.items():
        if zero.get(name) not in values:
            yield Problem(
                code="DEEPSPEED_GROUPS",
                key=f"deepspeed.zero_optimization.{name}",
                message=f"{name}={str(zero[name]).lower()} with {shown}: DeepSpeed groups "
                "neighbouring ranks of the world, which need not hold the same part of the model here",
                fix=f"Remove {name}, or set {' and '.join(f'parallel.{key}' for key in split)} to 1",
                source="deepspeed utils/groups.py _create_zero_param_parallel_group, _get_local_all_to_all_group",
            )


def cuda_kernels(draft: Draft) -> Iterator[Problem]:
    """Quantized communication and GPUDirect storage are CUDA code."""
    section = draft.job.deepspeed
    zero, aio = _mapping(section, "zero_optimization"), _mapping(section, "aio")
    wanted = [
        f"zero_optimization.{key}" for key in ("zero_quantized_weights", "zero_quantized_gradients") if zero.get(key)
    ]
    wanted += ["aio.use_gds"] if aio.get("use_gds") else []
    for path in wanted:
        if draft.on_cpu:
            yield Problem(
                code="DEEPSPEED_CARD",
                key=f"deepspeed.{path}",
                message=f"deepspeed.{path}=true on gpu=cpu: it exists as CUDA code only",
                fix="Set it to false, or cluster.gpu to a card",
                source="deepspeed runtime/zero/partition_parameters.py CUDAQuantizer, runtime/swap_tensor/aio_config.py",
            )
    if zero.get("zero_quantized_gradients") and zero.get("reduce_scatter") is False:
        yield Problem(
            code="DEEPSPEED_QUANTIZED",
            key="deepspeed.zero_optimization.reduce_scatter",
            message="reduce_scatter=false with zero_quantized_gradients=true: quantized gradients travel by all-to-all",
            fix="Set one of the two the other way",
            source="deepspeed runtime/zero/stage3.py DeepSpeedZeroOptimizer_Stage3",
        )


def swap_buffers(draft: Draft) -> Iterator[Problem]:
    """An NVMe swap needs a buffer for each state at once, and once more for each pipelined direction."""
    optimizer = _mapping(_mapping(draft.job.deepspeed, "zero_optimization"), "offload_optimizer")
    if draft.profile.optimizer != "nvme":
        return
    pipelined = (optimizer.get("pipeline_read") is True) + (optimizer.get("pipeline_write") is True)
    needed = _SWAPPED_TENSORS * (1 + pipelined)
    count = optimizer.get("buffer_count", _SWAPPED_TENSORS)
    if isinstance(count, int) and count < needed:
        yield Problem(
            code="DEEPSPEED_BUFFERS",
            key="deepspeed.zero_optimization.offload_optimizer.buffer_count",
            message=f"buffer_count={count} is below {needed}: {_SWAPPED_TENSORS} tensors swap at once, in each direction",
            fix=f"Set it to at least {needed}"
            + (", or pipeline_read and pipeline_write to false" if pipelined else ""),
            source="deepspeed runtime/swap_tensor/pipelined_optimizer_swapper.py _swap_in_optimizer_state",
        )


def _mapping(section: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = section.get(key)
    return value if isinstance(value, Mapping) else {}


RULES = (of_effect, scaled_reduction, secondary_partition, groups_of_neighbours, cuda_kernels, swap_buffers)
