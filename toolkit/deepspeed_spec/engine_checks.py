"""What DeepSpeed's parser takes and its engine then refuses, fails on or spoils, in a given run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from toolkit.deepspeed_spec.facts import EngineFacts
from toolkit.deepspeed_spec.findings import Finding, Outcome
from toolkit.deepspeed_spec.nested import lookup, subsection
from toolkit.topology.grid import divisors, join

# Adam swaps its master copy, two moments and the gradient at once (swap_tensor/partitioned_optimizer_swapper.py).
_SWAPPED_TENSORS = 4


def engine_findings(config: Mapping[str, Any], facts: EngineFacts) -> Iterator[Finding]:
    """Says what the engine would make of a configuration that its parser takes.

    Args:
        config: As `read_config` gave it.
        facts: Of the run.
    """
    for check in _CHECKS:
        yield from check(config, facts)


def _scaled_reduction(config: Mapping[str, Any], facts: EngineFacts) -> Iterator[Finding]:
    """Prescaling and predivision need all-reduce: stages 2 and 3 assert it, stage 1 ignores them without it."""
    stage, factor = facts.zero_stage, config.get("gradient_predivide_factor", 1.0)
    predivided = isinstance(factor, int | float) and factor != 1
    scatters = subsection(config, "zero_optimization").get("reduce_scatter", True)
    if predivided and stage == 3 and factor == facts.dp_size:
        yield Finding(
            code="DEEPSPEED_PREDIVIDE",
            path="gradient_predivide_factor",
            message=(
                f"={factor:g} equals the number of data-parallel ranks with zero_stage=3: stage 3 then divides by it twice, so "
                f"every gradient is {factor:g} times too small"
            ),
            fix="Set it to another value, such as 1, or set parallel.zero_stage to 2",
            outcome="other",
            source="deepspeed runtime/zero/stage3.py __avg_scatter_contiguous_grads, _gradient_averaging_world_size",
        )
    for path in ("prescale_gradients", "gradient_predivide_factor"):
        is_on = predivided if path == "gradient_predivide_factor" else config.get(path) is True
        if is_on and scatters is True and stage > 0 and not facts.uses_bf16_optimizer:
            yield Finding(
                code="DEEPSPEED_PRESCALE",
                path=path,
                message=" with reduce_scatter=true: stages 2 and 3 refuse it, stage 1 ignores it",
                fix="Set zero_optimization.reduce_scatter to false, or remove it",
                outcome="other" if stage == 1 else "refused",
                source="deepspeed runtime/zero/stage_1_and_2.py DeepSpeedZeroOptimizer",
            )


def _secondary_partition(config: Mapping[str, Any], facts: EngineFacts) -> Iterator[Finding]:
    """The secondary partition of ZeRO++ divides the world; a larger one is cut without a word."""
    path = "zero_optimization.zero_hpz_partition_size"
    size, ranks = lookup(config, path), facts.num_ranks
    if facts.zero_stage == 3 and isinstance(size, int) and size > 0 and ranks is not None and ranks % size:
        yield Finding(
            code="DEEPSPEED_HPZ",
            path=path,
            message=f"={size} does not divide the world of {ranks} ranks",
            fix=f"Set it to one of {join(divisors(ranks))}; the cards of a node are what it is meant for",
            outcome="other" if size > ranks else "refused",
            source="deepspeed utils/groups.py _create_zero_param_parallel_group",
        )


def _groups_of_neighbours(config: Mapping[str, Any], facts: EngineFacts) -> Iterator[Finding]:
    """hpZ and quantized gradients make groups of the world's neighbours, which may hold other shards or other layers."""
    if not facts.split:
        return
    zero, shown = (
        subsection(config, "zero_optimization"),
        " and ".join(f"{name}={size}" for name, size in facts.split.items()),
    )
    without_groups = {"zero_hpz_partition_size": (None, 0, 1), "zero_quantized_gradients": (None, False)}
    for name, values in without_groups.items():
        if zero.get(name) not in values:
            yield Finding(
                code="DEEPSPEED_GROUPS",
                path=f"zero_optimization.{name}",
                message=f"={str(zero[name]).lower()} with {shown}: DeepSpeed groups neighbouring ranks of the world, which need "
                "not hold the same part of the model here",
                fix=f"Remove {name}, or set {' and '.join(f'parallel.{key}' for key in facts.split)} to 1",
                outcome="refused",
                source="deepspeed utils/groups.py _create_zero_param_parallel_group, _get_local_all_to_all_group",
            )


def _cuda_kernels(config: Mapping[str, Any], facts: EngineFacts) -> Iterator[Finding]:
    """Quantized communication and GPUDirect storage are CUDA code."""
    wanted = ("zero_optimization.zero_quantized_weights", "zero_optimization.zero_quantized_gradients", "aio.use_gds")
    for path in wanted if facts.on_cpu else ():
        if lookup(config, path):
            yield Finding(
                code="DEEPSPEED_CARD",
                path=path,
                message="=true on gpu=cpu: it exists as CUDA code only",
                fix="Set it to false, or cluster.gpu to a card",
                outcome="refused",
                source="deepspeed runtime/zero/partition_parameters.py CUDAQuantizer, runtime/swap_tensor/aio_config.py",
            )


def _quantized_gradients(config: Mapping[str, Any], facts: EngineFacts) -> Iterator[Finding]:
    zero = subsection(config, "zero_optimization")
    if facts.zero_stage == 3 and zero.get("zero_quantized_gradients") and zero.get("reduce_scatter") is False:
        yield Finding(
            code="DEEPSPEED_QUANTIZED",
            path="zero_optimization.reduce_scatter",
            message="=false with zero_quantized_gradients=true: quantized gradients travel by all-to-all",
            fix="Set one of the two the other way",
            outcome="refused",
            source="deepspeed runtime/zero/stage3.py DeepSpeedZeroOptimizer_Stage3",
        )


def _swap_buffers(config: Mapping[str, Any], facts: EngineFacts) -> Iterator[Finding]:
    """An NVMe swap needs a buffer for each state at once, and once more for each pipelined direction."""
    optimizer = subsection(config, "zero_optimization.offload_optimizer")
    if facts.zero_stage != 3 or facts.optimizer_device != "nvme":
        return
    pipelined = (optimizer.get("pipeline_read") is True) + (optimizer.get("pipeline_write") is True)
    needed = _SWAPPED_TENSORS * (1 + pipelined)
    count = optimizer.get("buffer_count", _SWAPPED_TENSORS)
    if isinstance(count, int) and count < needed:
        yield Finding(
            code="DEEPSPEED_BUFFERS",
            path="zero_optimization.offload_optimizer.buffer_count",
            message=f": buffer_count={count} is below {needed}: {_SWAPPED_TENSORS} tensors swap at once, in each direction",
            fix=f"Set it to at least {needed}"
            + (", or pipeline_read and pipeline_write to false" if pipelined else ""),
            outcome="refused",
            source="deepspeed runtime/swap_tensor/pipelined_optimizer_swapper.py _swap_in_optimizer_state",
        )


def _swap_folder(config: Mapping[str, Any], facts: EngineFacts) -> Iterator[Finding]:
    devices = {"offload_optimizer": facts.optimizer_device, "offload_param": facts.parameter_device}
    for name, device in devices.items():
        path = f"zero_optimization.{name}.nvme_path"
        if not facts.is_job and facts.zero_stage == 3 and device == "nvme" and lookup(config, path) is None:
            yield _fails(
                path,
                " is left out with device=nvme: the engine fails on a path of None",
                "Set it to a folder on a local NVMe disk",
                source="deepspeed runtime/zero/stage3.py _configure_tensor_swapping",
            )


def _aligned_bucket(config: Mapping[str, Any], facts: EngineFacts) -> Iterator[Finding]:
    path = "zero_optimization.allgather_bucket_size"
    size = lookup(config, path)
    if facts.zero_stage in (1, 2) and isinstance(size, int) and size % 2 and facts.uses_bf16_optimizer is False:
        yield _fails(
            path,
            f"={size} (int) is not valid: stages 1 and 2 need an even size",
            f"Set it to {size + 1}",
            source="deepspeed runtime/zero/stage_1_and_2.py DeepSpeedZeroOptimizer",
        )


def _first_stage_1(config: Mapping[str, Any], facts: EngineFacts) -> Iterator[Finding]:
    path = "zero_optimization.legacy_stage1"
    if lookup(config, path) and facts.zero_stage > 0:
        yield _fails(
            path,
            "=true: this DeepSpeed has no such optimizer any more",
            "Remove it",
            source="deepspeed runtime/engine.py _configure_zero_optimizer",
        )


def _clipping_of_the_optimizer(config: Mapping[str, Any], facts: EngineFacts) -> Iterator[Finding]:
    path = "optimizer.params.max_grad_norm"
    if lookup(config, path) is not None:
        yield _fails(
            path,
            " is no parameter of an optimizer any more",
            "Set gradient_clipping instead",
            source="deepspeed runtime/engine.py _configure_basic_optimizer",
        )


def _fails(path: str, message: str, fix: str, *, source: str, outcome: Outcome = "refused") -> Finding:
    return Finding(code="DEEPSPEED_VALUE", path=path, message=message, fix=fix, outcome=outcome, source=source)


_CHECKS: tuple[Callable[[Mapping[str, Any], EngineFacts], Iterator[Finding]], ...] = (
    _scaled_reduction,
    _secondary_partition,
    _groups_of_neighbours,
    _cuda_kernels,
    _quantized_gradients,
    _swap_buffers,
    _swap_folder,
    _aligned_bucket,
    _first_stage_1,
    _clipping_of_the_optimizer,
)
