"""The settings that may run on a cluster: what the job leaves open, within what it says and what the rules of plans allow."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator
from typing import Any

from toolkit.catalog.tasks import task_of
from toolkit.config.job import TORCH_ADAMW, ExpertSharding, Job, Kernels, Loss, Offload
from toolkit.planner.bounds import Setting, is_streamed, least_bytes
from toolkit.planner.clusters import Candidate
from toolkit.planner.question import Question
from toolkit.planner.shape import Shape, itemsize_of, precision_on
from toolkit.planning.offload import PROFILES
from toolkit.planning.rules.kernels import PLAIN_MODEL_TYPES
from toolkit.topology.grid import divisors

# Share of a card beyond which weights and gradients leave too little for a data-parallel rank: layers are then split as well.
_SPLIT_ABOVE = 0.5

# Most tokens of a micro-batch: beyond, products gain nothing (docs/benchmarks.md).
_MOST_TOKENS = 131_072
_MOST_SIZES = 6

# Profiles that are tried where no other holds the job: each is slower, and none needs less than those that move the optimizer.
LAST_RESORTS = ("activations-cpu", "optimizer-nvme", "full-nvme")
# Shares of the optimizer's state that a partial offload moves.
_RATIOS = (0.25, 0.5, 0.75)

Mode = tuple[Loss, Kernels, bool]
Engine = tuple[int, Offload, float]


def layouts(question: Question, shape: Shape, cluster: Candidate) -> Iterator[tuple[int, int]]:
    """Yield sizes of the tensor and pipeline axes; the data-parallel axis has the other ranks.

    Layers are split only where data-parallel ranks alone could not hold the weights, or outnumber the sequences of a step.
    """
    tensor, pipeline = question.said("parallel.tensor"), question.said("parallel.pipeline")
    strategy = question.job.parallel.strategy
    itemsize = itemsize_of(precision_on(question.job, cluster.gpu))
    batch = question.job.train.train_batch_size
    alone = least_bytes(shape, stage=2, offload="none", split=1, ranks=cluster.num_gpus, itemsize=itemsize)
    cuts = task_of(question.job.model, question.model.config) == "causal-lm"  # models of other tasks stay whole
    splits = cuts and (
        alone > _SPLIT_ABOVE * (cluster.gpu.memory_bytes or 0) or (batch is not None and batch < cluster.num_gpus)
    )
    powers = [1 << power for power in range(6)]
    for tp_size in [tensor] if tensor else powers:
        if tp_size not in _sharers(question):
            continue
        if cluster.gpus_per_node % tp_size or (tp_size > 1 and not tensor and (not splits or strategy != "zero")):
            continue
        for pp_size in [pipeline] if pipeline else powers:
            if cluster.num_gpus % (tp_size * pp_size) or pp_size > question.model.num_hidden_layers:
                continue
            if pp_size == 1 or pipeline or (splits and strategy == "zero"):
                yield tp_size, pp_size


def _sharers(question: Question) -> Container[int]:
    """Return the sizes of the tensor axis that the job's way to share experts allows."""
    if question.said("parallel.experts") == "whole" and question.model.num_experts:
        return [size for size in divisors(question.model.num_experts) if size > 1]
    return range(1, 1 << 30)


def expert_shardings(question: Question, *, tensor: int) -> list[ExpertSharding]:
    """Return how tensor ranks may share experts: as the job says, else sliced, and whole where each rank can have as many."""
    said, count = question.said("parallel.experts"), question.model.num_experts
    if said is not None:
        return [said]
    divides = tensor > 1 and count and count % tensor == 0 and not question.said("train.torch_compile")
    return ["sliced", "whole"] if divides else ["sliced"]


def engines(question: Question, cluster: Candidate, *, tensor: int = 1, pipeline: int) -> Iterator[Engine]:
    """Yield ZeRO stages, each with the offload profiles that go with it and the shares that these move."""
    job = question.job
    strategy, said = job.parallel.strategy, question.said("parallel.zero_stage")
    if strategy != "zero":
        yield (0 if strategy == "ddp" else 3), job.parallel.offload, 1.0
        return
    offload, ratio = question.said("parallel.offload"), question.said("parallel.offload_ratio")
    ranks = cluster.num_gpus // (tensor * pipeline)
    for stage in [said] if said is not None else [0, 1, 2, 3]:
        if said is None and stage == 0 and not _may_replicate(question, cluster, ranks=ranks, split=tensor * pipeline):
            continue
        if said is None and stage == 3 and (pipeline > 1 or job.train.method == "qlora"):
            continue
        streams = ranks == 1 and tensor == pipeline == 1 and may_stream(question)
        profiles = _profiles(job, stage=stage, pipeline=pipeline) + (["full-cpu"] if stage == 2 and streams else [])
        for profile in [offload] if offload is not None else profiles:
            if is_streamed(stage, profile) and not streams:
                continue
            if PROFILES[profile].partial:
                yield from ((stage, profile, share) for share in ([ratio] if ratio is not None else _RATIOS))
            else:
                yield stage, profile, 1.0


def may_stream(question: Question) -> bool:
    """Return whether the toolkit may bring the layers' weights to the card: what the job says does not forbid it.

    That is one card alone: each of several would have all streamed weights in host memory of its own.
    """
    job, said = question.job, question.said
    return (
        task_of(job.model, question.model.config) == "causal-lm"
        and job.train.method != "qlora"
        and job.train.optimizer in ("adamw", *TORCH_ADAMW)
        and job.parallel.context == 1
        and said("parallel.offload_engine") != "deepspeed"
        and not said("train.torch_compile")
    )


def _may_replicate(question: Question, cluster: Candidate, *, ranks: int, split: int) -> bool:
    """Return whether ZeRO-0 is among the choices: on one rank, where its gradients are summed and stepped as those of other stages.

    Source:
        deepspeed runtime/fp16/fused_optimizer.py step: gradients of the training precision, cast to fp32 for the step, as
        runtime/zero/stage_1_and_2.py does; measured by benchmarks/job_speed.py, losses of l3b-zero0 and q05-compile-zero0 differ
        by up to 2e-5. fp16 has another loss scaler there, and is left out.
    """
    precision = precision_on(question.job, cluster.gpu)
    sums = question.job.train.gradient_accumulation_dtype
    return ranks == 1 and split == 1 and precision in ("bf16", "fp32") and sums in (None, precision)


def _profiles(job: Job, *, stage: int, pipeline: int) -> list[Offload]:
    """Return the offload profiles of a stage; files are chosen only where the job names a folder for them."""
    train = job.train
    found: list[Offload] = ["none"]
    if stage and train.optimizer in ("adamw", *TORCH_ADAMW):
        found.append("optimizer-cpu")
        if stage < 3 and pipeline == 1:
            found.append("optimizer-cpu-partial")
        if stage == 3:
            found += ["full-cpu"] if train.optimizer != "adamw" else ["optimizer-cpu-partial", "full-cpu"]
            if job.cluster.nvme_path is not None:
                found += ["optimizer-nvme", "full-nvme"]
    if stage and pipeline == 1:
        found.append("activations-cpu")
    return found


def modes(
    question: Question, *, stage: int, tensor: int, pipeline: int, precision: str, compiles: bool = True
) -> Iterator[Mode]:
    """Yield losses, kernels and whether layers are compiled, which may be left out where the job does not say so itself."""
    said_loss, said_kernels = question.said("train.loss"), question.said("train.kernels")
    said_compile = question.said("train.torch_compile")
    data = question.job.data
    liger = question.liger and precision != "fp16"
    causal = task_of(question.job.model, question.model.config) == "causal-lm"
    losses: list[Loss] = ["full"] if tensor > 1 or not causal else ["full", "chunked", *(["liger"] if liger else [])]  # type: ignore[list-item]
    norms = liger and question.model.model_type not in PLAIN_MODEL_TYPES
    kernels: list[Kernels] = ["eager", "liger"] if norms else ["eager"]
    fixed = stage == 3 or pipeline > 1 or tensor > 1 or (data is not None and data.packing == "separated")
    compiled = [False] if fixed or not compiles else [False, True]
    for loss, kernel, compiles in itertools.product(
        [said_loss] if said_loss is not None else losses,
        [said_kernels] if said_kernels is not None else kernels,
        [said_compile] if said_compile is not None else compiled,
    ):
        if not (compiles and kernel == "liger"):
            yield loss, kernel, compiles


def batches(question: Question, cluster: Candidate, *, split: int, pipeline: int) -> Iterator[tuple[int, int]]:
    """Yield micro-batch and accumulation that keep the global batch, the smallest micro-batch first."""
    train = question.job.train
    dp_size = cluster.num_gpus // split
    micro, accumulation = train.per_device_train_batch_size, train.gradient_accumulation_steps
    if train.train_batch_size is None:
        if micro is not None and accumulation is not None:
            yield micro, accumulation
        elif micro is not None:
            yield micro, max(1, 4 * pipeline if pipeline > 1 else 1)
        elif accumulation is not None:
            yield from ((1 << power, accumulation) for power in range(_MOST_SIZES))
        return
    share, remainder = divmod(train.train_batch_size, dp_size)
    if remainder or not share:
        return
    length = train.sequence_length or 1
    sizes = [size for size in divisors(share) if size == 1 or size * length <= _MOST_TOKENS]
    for size in sizes[:1] + sizes[1:][-_MOST_SIZES:] if len(sizes) > _MOST_SIZES else sizes:
        count = share // size
        fits = (micro is None or micro == size) and (accumulation is None or accumulation == count)
        if fits and (pipeline == 1 or count >= pipeline or size == 1):
            yield size, count


def shares_recomputed(question: Question) -> tuple[float, ...]:
    """Return the shares of layers that may recompute their activations, from none to all."""
    said = question.job.train.recomputed_share
    return (0.0, 0.5, 1.0) if said is None else (float(said),)


def values_of(question: Question, cluster: Candidate, setting: Setting) -> dict[str, Any]:
    """Return the values of the job that put a setting on a cluster, by dotted key; what the job says is not among them."""
    found = setting.values() | {"train.gradient_checkpointing": _checkpointing(setting.checkpointing)}
    if question.job.parallel.strategy != "zero":
        del found["parallel.zero_stage"]
    chosen = {key: value for key, value in found.items() if question.said(key) is None}
    if question.sets_steps and question.job.train.train_batch_size is None:
        dp_size = cluster.num_gpus // (setting.tensor * setting.pipeline)
        steps = question.steps(setting.micro * setting.accumulation * dp_size)
        chosen |= {"train.max_steps": steps, "train.num_train_epochs": None}
        chosen |= question.job.train.in_shares(question.epochs)
    return ({} if not question.seeks_cluster else cluster.values()) | chosen


def _checkpointing(share: float) -> bool | float:
    return bool(share) if share in (0, 1) else share
