"""Values that DeepSpeed's parser accepts and its engine then refuses, fails on or corrupts, in a given run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter

from toolkit.deepspeed_spec.effects import ineffective_keys
from toolkit.deepspeed_spec.facts import EngineFacts
from toolkit.deepspeed_spec.findings import Finding, refused
from toolkit.deepspeed_spec.schema import DeepSpeedConfig
from toolkit.deepspeed_spec.step_checks import STEP_CHECKS
from toolkit.deepspeed_spec.validation import Reading
from toolkit.deepspeed_spec.zero import OffloadOptimizer
from toolkit.topology.grid import divisors, join

# Adam swaps its master copy, two moments and the gradient at once (swap_tensor/partitioned_optimizer_swapper.py).
_SWAPPED_TENSORS = 4


def run_findings(reading: Reading, facts: EngineFacts) -> list[Finding]:
    """Return the keys without effect in a given run, and the others that its engine refuses or fails on."""
    engine = (finding for check in _CHECKS for finding in check(reading.keys, facts))
    return [*ineffective_keys(reading.config, facts), *engine]


def _scaled_reduction(keys: DeepSpeedConfig, facts: EngineFacts) -> Iterator[Finding]:
    """Find prescaling and predivision without all-reduce: stages 2 and 3 assert it, stage 1 ignores them."""
    stage, factor = facts.zero_stage, keys.gradient_predivide_factor
    if factor != 1 and stage == 3 and factor == facts.dp_size:
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
    if not keys.zero_optimization.reduce_scatter or stage == 0 or facts.uses_bf16_optimizer:
        return
    scaled = {"prescale_gradients": keys.prescale_gradients, "gradient_predivide_factor": factor != 1}
    for path in (path for path, is_on in scaled.items() if is_on):
        yield Finding(
            code="DEEPSPEED_PRESCALE",
            path=path,
            message=" with reduce_scatter=true: stages 2 and 3 refuse it, stage 1 ignores it",
            fix="Set zero_optimization.reduce_scatter to false, or remove it",
            outcome="other" if stage == 1 else "refused",
            source="deepspeed runtime/zero/stage_1_and_2.py DeepSpeedZeroOptimizer",
        )


def _secondary_partition(keys: DeepSpeedConfig, facts: EngineFacts) -> Iterator[Finding]:
    """Find a secondary partition of ZeRO++ that does not divide the world; DeepSpeed reduces a larger one silently."""
    size, ranks = keys.zero_optimization.zero_hpz_partition_size, facts.num_ranks
    if facts.zero_stage == 3 and size > 0 and ranks is not None and ranks % size:
        yield Finding(
            code="DEEPSPEED_HPZ",
            path="zero_optimization.zero_hpz_partition_size",
            message=f"={size} does not divide the world of {ranks} ranks",
            fix=f"Set it to one of {join(divisors(ranks))}; it is meant to be the number of GPUs of a node",
            outcome="other" if size > ranks else "refused",
            source="deepspeed utils/groups.py _create_zero_param_parallel_group",
        )


def _groups_of_neighbours(keys: DeepSpeedConfig, facts: EngineFacts) -> Iterator[Finding]:
    """Find hpZ and quantized gradients in a split model, where groups of consecutive ranks may hold other shards or layers."""
    zero, sizes = keys.zero_optimization, " and ".join(f"{name}={size}" for name, size in facts.split.items())
    grouped = {
        "zero_hpz_partition_size": zero.zero_hpz_partition_size > 1,
        "zero_quantized_gradients": zero.zero_quantized_gradients,
    }
    for name, is_on in grouped.items():
        if facts.split and is_on:
            yield Finding(
                code="DEEPSPEED_GROUPS",
                path=f"zero_optimization.{name}",
                message=f"={str(getattr(zero, name)).lower()} with {sizes}: DeepSpeed groups neighbouring ranks of "
                "the world, which may have different parts of the model here",
                fix=f"Remove {name}, or set {' and '.join(f'parallel.{key}' for key in facts.split)} to 1",
                outcome="refused",
                source="deepspeed utils/groups.py _create_zero_param_parallel_group, _get_local_all_to_all_group",
            )


def _cuda_kernels(keys: DeepSpeedConfig, facts: EngineFacts) -> Iterator[Finding]:
    """Find quantized communication and GPUDirect storage on CPU: they are CUDA code."""
    wanted = ("zero_optimization.zero_quantized_weights", "zero_optimization.zero_quantized_gradients", "aio.use_gds")
    for path in wanted if facts.on_cpu else ():
        if attrgetter(path)(keys):
            yield Finding(
                code="DEEPSPEED_CARD",
                path=path,
                message="=true on gpu=cpu: it exists in CUDA only",
                fix="Set it to false, or cluster.gpu to a card",
                outcome="refused",
                source="deepspeed runtime/zero/partition_parameters.py CUDAQuantizer, runtime/swap_tensor/aio_config.py",
            )


def _quantized_gradients(keys: DeepSpeedConfig, facts: EngineFacts) -> Iterator[Finding]:
    zero = keys.zero_optimization
    if facts.zero_stage == 3 and zero.zero_quantized_gradients and not zero.reduce_scatter:
        yield Finding(
            code="DEEPSPEED_QUANTIZED",
            path="zero_optimization.reduce_scatter",
            message="=false with zero_quantized_gradients=true: quantized gradients are exchanged by all-to-all",
            fix="Change one of the two",
            outcome="refused",
            source="deepspeed runtime/zero/stage3.py DeepSpeedZeroOptimizer_Stage3",
        )


def _swap_buffers(keys: DeepSpeedConfig, facts: EngineFacts) -> Iterator[Finding]:
    """Find too few buffers for an NVMe swap: it needs one per state, and as many again per pipelined direction."""
    if facts.zero_stage != 3 or facts.optimizer_device != "nvme":
        return
    optimizer = keys.zero_optimization.offload_optimizer or OffloadOptimizer()
    pipelined = optimizer.pipeline_read + optimizer.pipeline_write
    needed, count = _SWAPPED_TENSORS * (1 + pipelined), optimizer.buffer_count
    if count < needed:
        yield Finding(
            code="DEEPSPEED_BUFFERS",
            path="zero_optimization.offload_optimizer.buffer_count",
            message=f": buffer_count={count} is below {needed}: {_SWAPPED_TENSORS} tensors swap at once, in each direction",
            fix=f"Set it to at least {needed}"
            + (", or pipeline_read and pipeline_write to false" if pipelined else ""),
            outcome="refused",
            source="deepspeed runtime/swap_tensor/pipelined_optimizer_swapper.py _swap_in_optimizer_state",
        )


def _swap_folder(keys: DeepSpeedConfig, facts: EngineFacts) -> Iterator[Finding]:
    """Find an NVMe offload without a folder; a job has it in `cluster`, where a rule of the plan requires it."""
    zero = keys.zero_optimization
    for name, section in (("offload_optimizer", zero.offload_optimizer), ("offload_param", zero.offload_param)):
        if facts.zero_stage == 3 and section is not None and section.device == "nvme" and section.nvme_path is None:
            yield refused(
                f"zero_optimization.{name}.nvme_path",
                " is left out with device=nvme: the engine needs a path",
                "Set it to a folder on a local NVMe disk",
                source="deepspeed runtime/zero/stage3.py _configure_tensor_swapping",
            )


def _aligned_bucket(keys: DeepSpeedConfig, facts: EngineFacts) -> Iterator[Finding]:
    size = keys.zero_optimization.allgather_bucket_size
    if facts.zero_stage in (1, 2) and size % 2 and facts.uses_bf16_optimizer is False:
        yield refused(
            "zero_optimization.allgather_bucket_size",
            f"={size} (int) is not valid: stages 1 and 2 need an even size",
            f"Set it to {size + 1}",
            source="deepspeed runtime/zero/stage_1_and_2.py DeepSpeedZeroOptimizer",
        )


def _first_stage_1(keys: DeepSpeedConfig, facts: EngineFacts) -> Iterator[Finding]:
    if keys.zero_optimization.legacy_stage1 and facts.zero_stage > 0:
        yield refused(
            "zero_optimization.legacy_stage1",
            "=true: this DeepSpeed no longer has that optimizer",
            "Remove it",
            source="deepspeed runtime/engine.py _configure_zero_optimizer",
        )


def _clipping_of_the_optimizer(keys: DeepSpeedConfig, facts: EngineFacts) -> Iterator[Finding]:
    if keys.optimizer_params.get("max_grad_norm") is not None:
        yield refused(
            "optimizer.params.max_grad_norm",
            " is no longer a parameter of an optimizer",
            "Set gradient_clipping instead",
            source="deepspeed runtime/engine.py _configure_basic_optimizer",
        )


_CHECKS: tuple[Callable[[DeepSpeedConfig, EngineFacts], Iterator[Finding]], ...] = (
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
    *STEP_CHECKS,
)
