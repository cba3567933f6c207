"""Disk space of a checkpoint, from what each file of it holds."""

from __future__ import annotations

from toolkit.plan.draft import Draft
from toolkit.plan.optimizer_state import MASTER_BYTES, moment_bytes


def leaves_frozen_out(draft: Draft) -> bool:
    """Whether checkpoints leave frozen weights out: those of LoRA lie in the model's folder, unless drawn at random."""
    return draft.job.train.method != "full" and draft.settings.init == "pretrained"


def checkpoint_bytes(draft: Draft, *, total: int, trainable: int) -> int:
    """Gives the size of one checkpoint over all ranks, bytes.

    Args:
        draft: Stage, precision and optimizer.
        total: Parameters of the model, adapters included.
        trainable: Those that are trained.

    Source:
        deepspeed runtime/engine.py _save_checkpoint, _save_zero_checkpoint: up to stage 2 the model's weights in training
        precision and the optimizer's partitions; under stage 3 the latter alone, for the weights are placeholders, and
        frozen partitions whole.
    """
    settings, train = draft.settings, draft.job.train
    width = 4 if settings.precision == "fp32" else 2
    frozen = 0 if leaves_frozen_out(draft) else total - trainable
    states = moment_bytes(train)
    strategy = draft.job.parallel.strategy
    if strategy == "ddp":  # moments in the weights' precision, but for those in 8 bit
        scale = 1.0 if train.optimizer == "adamw_8bit" else width / 4
        return int(width * (frozen + trainable) + states * scale * trainable)
    if strategy == "fsdp2":  # fp32 shards, which are the master copy
        return int(width * frozen + (MASTER_BYTES + states) * trainable)
    # The bare optimizer of fp32 at stage 0 has no master copy (engine.py _do_optimizer_sanity_check).
    master = 0 if settings.zero_stage == 0 and settings.precision == "fp32" else MASTER_BYTES
    weights = 0 if settings.zero_stage == 3 else trainable
    return int(width * (frozen + weights) + (master + states) * trainable)
