"""The ZeRO stage of a job that names none: the lowest whose state leaves room on the card."""

from __future__ import annotations

from toolkit.catalog.gpus import Gpu
from toolkit.catalog.models import ModelSpec
from toolkit.config.job import Job, Precision
from toolkit.planning.offload import profile_of
from toolkit.planning.state_bytes import card_bytes, step_bytes
from toolkit.units import format_bytes

# Share of a card's memory that model and optimizer state may take before ZeRO-3 becomes the default;
# the rest is left to activations, buckets and the allocator.
STATE_SHARE = 0.6

# Share of a card's memory that the step of stage 2 may take on one rank, where nothing is sharded and activations are
# freed before it; the slack of the allocator and the CUDA context take up to a twentieth of the card more
# (memory/report/overhead.py).
STEP_SHARE = 0.88

# DeepSpeed's own default, parameters (runtime/zero/config.py).
SUB_GROUP_SIZE = 1_000_000_000


def default_stage(job: Job, model: ModelSpec, gpu: Gpu, precision: Precision) -> tuple[int, str]:
    """Return the stage and the reason for it, as a clause."""
    if job.parallel.strategy != "zero":
        stages = {"ddp": (0, "DDP replicates everything"), "fsdp2": (3, "FSDP2 shards everything")}
        return stages[job.parallel.strategy]
    if job.train.method == "qlora":
        return 2, "packed 4-bit weights cannot be partitioned"
    profile = profile_of(job.parallel)
    if profile.streams:
        return 2, "whole layers are streamed from host memory, and stage 2 has their gradients leave as they come"
    if max(profile.min_zero_stage, profile.deepspeed_from) == 3:
        return 3, f"the offload profile {job.parallel.offload} needs its partitioned parameters"
    if job.parallel.pipeline > 1:
        return _default_stage_of_pipeline(job, model, gpu, precision)
    if job.dp_size <= 1:
        return _default_stage_of_one_rank(job, model, gpu, precision)
    if gpu.memory_bytes is None:
        return 2, "on CPU memory is shared; stage 2 shards optimizer and gradients"
    if model.num_parameters is None:
        return 3, "the parameter count of this architecture is unknown, and stage 3 needs the least memory"
    state = card_bytes(job, model, precision, stage=2)
    compared = _compared(state, gpu.memory_bytes, stage=2)
    if state <= STATE_SHARE * gpu.memory_bytes:
        return 2, f"parameters need not be sharded, which is fastest, since they fit: {compared}"
    return 3, f"parameters must be sharded too: {compared}"


def _default_stage_of_one_rank(job: Job, model: ModelSpec, gpu: Gpu, precision: Precision) -> tuple[int, str]:
    """Return the stage of a rank that has no other to shard with: the stages differ in the copies that they make.

    Source:
        deepspeed runtime/engine.py _do_optimizer_sanity_check (stage 0 in fp32 is the bare optimizer),
        runtime/zero/stage_1_and_2.py step (fp32 gradients of all parameters), stage3.py step (of one sub-group).
    """
    if job.train.method != "full":
        return 2, "with a single rank stage 3 would save nothing: there is no rank to shard frozen weights with"
    if gpu.memory_bytes is None:
        return 2, "on CPU memory is shared, and a single rank has nothing to shard"
    if precision == "fp32" and profile_of(job.parallel).min_zero_stage == 0 and job.parallel.tensor == 1:
        return 0, "with a single rank there is nothing to shard, and in fp32 higher stages would hold each weight twice"
    if model.num_parameters is None:
        return 3, "the parameter count of this architecture is unknown, and stage 3 needs the least memory"
    if job.train.gradient_accumulation_dtype == "fp32":
        return (
            2,
            "with a single rank there is nothing to shard, and gradients summed in fp32 are stepped without a copy",
        )
    if model.num_parameters <= job.model_ranks * SUB_GROUP_SIZE:
        return 2, "with a single rank there is nothing to shard, and all parameters fit one optimizer sub-group"
    needed, limit = step_bytes(job, model, precision), STEP_SHARE * gpu.memory_bytes
    compared = (
        f"{format_bytes(needed)} at the step of stage 2 against {STEP_SHARE:.0%} of {format_bytes(gpu.memory_bytes)}"
    )
    if needed <= limit:
        return (
            2,
            f"with a single rank there is nothing to shard, and the step of all parameters at once fits: {compared}",
        )
    return (
        3,
        "with a single rank nothing is sharded, but stage 3 steps one sub-group at a time, without fp32 gradients of all "
        f"parameters: {compared}",
    )


def _default_stage_of_pipeline(job: Job, model: ModelSpec, gpu: Gpu, precision: Precision) -> tuple[int, str]:
    if job.parallel.pipeline_schedule == "zb-h1":
        return 1, "zb-h1 defers the gradients of weights, and reduces them once per step"
    if gpu.memory_bytes is None:
        return 1, "a pipeline reduces gradients once per step, which is fastest, and on CPU memory is shared"
    alone = job.dp_size <= 1
    if alone and job.train.method != "full":
        return 1, "with a single replica there is no rank to shard frozen weights with"
    if model.num_parameters is None:
        return 3, "the parameter count of this architecture is unknown, and stage 3 needs the least memory"
    limit = STATE_SHARE * gpu.memory_bytes
    whole, sharded = (card_bytes(job, model, precision, stage=stage) for stage in (1, 2))
    if whole <= limit:
        compared = _compared(whole, gpu.memory_bytes, stage=1)
        return 1, f"a pipeline reduces gradients once per step, which is fastest, since they fit unsharded: {compared}"
    compared = _compared(sharded, gpu.memory_bytes, stage=2)
    if not alone and sharded <= limit:
        return 2, f"gradients are reduced after each micro-batch, since they do not fit unsharded: {compared}"
    if alone and model.num_parameters <= job.parallel.pipeline * SUB_GROUP_SIZE:
        return (
            1,
            "with a single replica there is nothing to shard, and the parameters of a stage fit one optimizer "
            "sub-group",
        )
    return 3, f"parameters must be sharded too, or stepped one sub-group at a time: {compared}"


def _compared(state: float, memory_bytes: int, *, stage: int) -> str:
    against = f"{STATE_SHARE:.0%} of {format_bytes(memory_bytes)}"
    return f"{format_bytes(state)} of state per rank under stage {stage} against {against}"
