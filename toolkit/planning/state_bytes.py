"""Bytes of a model's parameters, gradients and optimizer state, per rank, node, disk and checkpoint, from counts alone."""

from __future__ import annotations

import math

from toolkit.catalog.models import ModelSpec
from toolkit.config.job import Job, Optimizer, Precision, Train
from toolkit.planning.offload import PROFILES
from toolkit.planning.settings import ITEMSIZES, dtype_of
from toolkit.planning.unchecked_plan import UncheckedPlan, trainable_parameters

MASTER_BYTES = 4  # an fp32 copy
GRADIENT_BYTES = 4  # in fp32, where the state is offloaded

# Bytes per parameter in addition to it: Adam's two moments, Lion's one and the momentum of SGD in fp32 (arXiv 1910.02054,
# section 3.1; 2302.06675); schedule-free AdamW's second moment and the weights that it averages (2405.15682). 8-bit AdamW keeps two bytes, and for each of them a 4-byte scale per 256 elements (bitsandbytes
# optim/optimizer.py Optimizer2State.init_state). At most: Adafactor's rows and columns, here of a matrix of 16 rows, and Muon's,
# where embedding and head have the two moments of Adam and the other matrices one.
MOMENT_BYTES: dict[Optimizer, float] = {
    "adamw": 8,
    "adamw_torch": 8,
    "adamw_torch_fused": 8,
    "adamw_8bit": 2 + 2 * 4 / 256,
    "paged_adamw_8bit": 2 + 2 * 4 / 256,
    "schedule_free_adamw": 8,
    "adafactor": 0.25,
    "muon": 8,
    "lion": 4,
    "sgd": 4,
}

# Optimizers whose states have a type of their own, whatever that of the weights.
OF_OWN_TYPE = ("adamw_8bit", "paged_adamw_8bit", "adafactor", "lion")

# Master copy and moments, rounded up.
STATE_BYTES: dict[Optimizer, int] = {name: MASTER_BYTES + math.ceil(size) for name, size in MOMENT_BYTES.items()}


def moment_bytes(train: Train) -> float:
    """Return the bytes of moments per parameter; SGD has none without momentum."""
    return 0 if train.optimizer == "sgd" and not train.momentum else MOMENT_BYTES[train.optimizer]


def card_bytes(job: Job, model: ModelSpec, precision: Precision, *, stage: int) -> float:
    """Return the bytes of parameters, gradients and optimizer state on a rank's card, for a model of known size.

    Under ZeRO-1 a pipeline keeps the whole gradients of a rank's stages until it reduces them once a step, or their
    sums in fp32 where the job asks for these.

    Source:
        deepspeed runtime/zero/stage_1_and_2.py.
    """
    assert model.num_parameters is not None
    itemsize, num_ranks = ITEMSIZES[dtype_of(precision)], job.cluster.num_ranks
    trainable = trainable_parameters(job, model) or model.num_parameters
    optimizer = 0 if PROFILES[job.parallel.offload].optimizer else STATE_BYTES[job.train.optimizer]
    share = job.model_ranks
    in_fp32 = job.train.gradient_accumulation_dtype == "fp32"
    gradients = itemsize / num_ranks if stage == 2 else (4 if in_fp32 else itemsize) / share
    return itemsize * model.num_parameters / share + trainable * (gradients + optimizer / num_ranks)


def step_bytes(job: Job, model: ModelSpec, precision: Precision) -> float:
    """Return the bytes on a rank's card at the step of stage 1 or 2 without other ranks, for a model of known size.

    The gradients are there as they came, and flat in fp32; a buffer of fp32 sums is stepped as it is.

    Source:
        deepspeed runtime/zero/stage_1_and_2.py step, _use_compact_grad_partition_buffer; deepspeed_private.py shorten_step.
    """
    assert model.num_parameters is not None
    itemsize, share = ITEMSIZES[dtype_of(precision)], job.model_ranks
    trainable = trainable_parameters(job, model) or model.num_parameters
    if PROFILES[job.parallel.offload].optimizer:
        return card_bytes(job, model, precision, stage=2)
    gradients = itemsize + GRADIENT_BYTES
    if job.train.gradient_accumulation_dtype == "fp32" and itemsize < GRADIENT_BYTES:
        gradients = GRADIENT_BYTES
    return (itemsize * model.num_parameters + (gradients + STATE_BYTES[job.train.optimizer]) * trainable) / share


def offloaded_bytes(draft: UncheckedPlan) -> float | None:
    """Return the bytes that a CPU profile, or FSDP2, puts into one node's RAM, before rounding and without the processes' own.

    None where nothing is moved, and for a model of unknown size.

    Source:
        deepspeed runtime/zero/stage_1_and_2.py, stage3.py: buffers that stage gradients and parameters in 16 bit, and one more
        with accumulation or offloaded parameters. The ranks share each.
    """
    trainable = trainable_parameters(draft.job, draft.model)
    options = draft.job.parallel.fsdp2_options
    if options.cpu_offload and trainable is not None:
        frozen = max(0, (draft.model.num_parameters or trainable) - trainable) * draft.settings.itemsize
        shards = frozen + (MASTER_BYTES + GRADIENT_BYTES + moment_bytes(draft.job.train)) * trainable
        return shards * options.dp_replicate_size / draft.job.cluster.nodes
    if draft.profile.optimizer != "cpu" or trainable is None:
        return None
    if draft.offload_engine == "overlapped":
        return _overlapped_bytes(draft, trainable)
    buffers = 1 + (draft.settings.batch.accumulation > 1 or draft.profile.parameters is not None)
    moved = (STATE_BYTES["adamw"] + GRADIENT_BYTES + 2 * buffers) * draft.settings.offload_ratio * trainable
    if draft.profile.parameters == "cpu":  # frozen parameters move as well, in training precision
        moved += draft.settings.itemsize * max(0, (draft.model.num_parameters or trainable) - trainable)
    return moved / draft.job.cluster.nodes


def _overlapped_bytes(draft: UncheckedPlan, trainable: int) -> float:
    """Return a node's bytes where the toolkit steps on the host: master weights, moments, gradients and weights of 16 bits, and sums.

    The host also has the state that the card steps, for checkpoints. Streamed weights are whole for each rank of the node.
    """
    settings, nodes = draft.settings, draft.job.cluster.nodes
    sums = GRADIENT_BYTES if settings.zero_stage == 2 and settings.batch.accumulation > 1 else 0
    passed = settings.itemsize + sums + (0 if draft.profile.streams else settings.itemsize)
    shared = (STATE_BYTES["adamw"] + passed * settings.offload_ratio) * trainable / nodes
    if not draft.profile.streams:
        return shared
    whole = draft.model.num_parameters or trainable
    return shared + settings.itemsize * whole * draft.job.cluster.num_ranks / nodes


def swapped_bytes(draft: UncheckedPlan) -> int | None:
    """Return the bytes of a node's swap files under an NVMe profile; None for a model of unknown size.

    Source:
        deepspeed runtime/swap_tensor/partitioned_optimizer_swapper.py, partitioned_param_swapper.py.
    """
    total = draft.model.num_parameters
    if total is None:
        return None
    copies = STATE_BYTES[draft.job.train.optimizer] + GRADIENT_BYTES if draft.job.train.method == "full" else 0
    weights = draft.settings.itemsize if draft.profile.parameters == "nvme" else 0
    return total * (copies + weights) // draft.job.cluster.nodes


def leaves_frozen_out(draft: UncheckedPlan) -> bool:
    """Return whether checkpoints omit frozen weights: LoRA's are in the model's folder, unless initialized at random or changed.

    Packed ones are never saved: they are read, or drawn from the same seed, and packed again.
    """
    method = draft.job.train.method
    unchanged = draft.settings.init == "pretrained" and not draft.job.train.changes_base
    return method == "qlora" or (method == "lora" and unchanged)


def _kept_by_hook(job: Job) -> int:
    """Return how often all ranks together keep the gradients that a communication hook of DDP has not sent."""
    of_hook = {"power_sgd": job.cluster.num_ranks, "top_k": job.cluster.nodes}
    return of_hook.get(job.parallel.ddp_options.comm_hook, 0)


def copied_bytes(draft: UncheckedPlan, *, total: int, trainable: int, num_replicas: int) -> tuple[int, int]:
    """Return the host memory of a copy of what ranks write: of the first data-parallel one, and of each other.

    Args:
        draft: Plan with the stage, precision and optimizer.
        total: Parameters of one rank.
        trainable: Trained parameters among them.
        num_replicas: Data-parallel ranks.

    Source:
        deepspeed runtime/engine.py save_checkpoint: below stage 3 the first writes the weights; torch
        distributed/checkpoint/planner_helpers.py dedup_save_plans: what all hold is divided among them.
    """
    written = written_bytes(draft, total=total, trainable=trainable)
    whole = 0
    if draft.job.parallel.strategy == "zero" and draft.settings.zero_stage < 3:
        whole = draft.settings.itemsize * (trainable + (0 if leaves_frozen_out(draft) else total - trainable))
    share = -(-(written - whole) // num_replicas)
    return whole + share, share


def written_bytes(draft: UncheckedPlan, *, total: int, trainable: int) -> int:
    """Return the size of one checkpoint over all ranks, bytes, where ranks have different numbers of parameters.

    Args:
        draft: Plan with the stage, precision and optimizer.
        total: Parameters of all ranks of one replica, replicated ones counted on each rank.
        trainable: Trained parameters among them.

    Source:
        deepspeed runtime/engine.py _save_checkpoint, _save_zero_checkpoint: up to stage 2 the model's weights in training
        precision and the optimizer's partitions; under stage 3 the latter alone, since the weights are placeholders, and
        frozen partitions whole. Weights alone have neither moments nor, below stage 3, master weights. Each tensor rank and each stage writes its own files, replicated parameters included.
    """
    settings, train = draft.settings, draft.job.train
    itemsize = settings.itemsize
    frozen = 0 if leaves_frozen_out(draft) else total - trainable
    only_model = train.save_only_model
    states = 0 if only_model else moment_bytes(train)
    strategy = draft.job.parallel.strategy
    if strategy == "ddp":  # moments in the weights' precision, except those of bitsandbytes
        scale = 1.0 if train.optimizer in OF_OWN_TYPE else itemsize / 4
        kept = 0 if only_model else itemsize * _kept_by_hook(draft.job)
        return int(itemsize * (frozen + trainable) + (states * scale + kept) * trainable)
    if strategy == "fsdp2":  # fp32 shards, which are the master copy
        return int(itemsize * frozen + (MASTER_BYTES + states) * trainable)
    has_master = draft.optimizer_wrapper != "none" and (settings.zero_stage == 3 or not only_model)
    master = MASTER_BYTES if has_master else 0
    weights = 0 if settings.zero_stage == 3 else trainable
    return int(itemsize * (frozen + weights) + (master + states) * trainable)
