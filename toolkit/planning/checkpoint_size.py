"""Disk space of a checkpoint, from what each file of it holds, and of all that a run keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from toolkit.planning.optimizer_state import MASTER_BYTES, moment_bytes
from toolkit.planning.unchecked_plan import UncheckedPlan, trainable_parameters


def leaves_frozen_out(draft: UncheckedPlan) -> bool:
    """Whether checkpoints leave frozen weights out: those of LoRA lie in the model's folder, unless drawn at random."""
    return draft.job.train.method != "full" and draft.settings.init == "pretrained"


def checkpoint_bytes(draft: UncheckedPlan, *, total: int, trainable: int) -> int:
    """Return the size of one checkpoint over all ranks, bytes.

    Args:
        draft: Stage, precision and optimizer.
        total: Parameters that one rank of the model holds, adapters included; without tensor ranks and stages, the model's.
        trainable: Those of them that are trained.

    Source:
        deepspeed runtime/engine.py _save_checkpoint, _save_zero_checkpoint: up to stage 2 the model's weights in training
        precision and the optimizer's partitions; under stage 3 the latter alone, for the weights are placeholders, and
        frozen partitions whole. Each tensor rank writes files of its own, also of what all of them hold, and each stage.
    """
    ranks = _model_ranks(draft)
    return written_bytes(draft, total=ranks * total, trainable=ranks * trainable)


def written_bytes(draft: UncheckedPlan, *, total: int, trainable: int) -> int:
    """Return the size of one checkpoint over all ranks, bytes, as `checkpoint_bytes` does where ranks hold different numbers.

    Args:
        draft: Stage, precision and optimizer.
        total: Parameters of all ranks of one model, counted on each that holds them.
        trainable: Those of them that are trained.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskUse:
    """What a run writes to `train.output_dir`, but for its logs and the tokens of its data.

    Args:
        checkpoint_bytes: One checkpoint, all ranks.
        num_checkpoints: So many lie there at once: those that stay, and the one that is being written.
        export_bytes: The safetensors that the run ends with.
    """

    checkpoint_bytes: int
    num_checkpoints: int
    export_bytes: int

    @property
    def total_bytes(self) -> int:
        """The most that lies there at once; a run that goes on after its export has all three."""
        return self.num_checkpoints * self.checkpoint_bytes + self.export_bytes

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as a JSON object."""
        return {
            "checkpoint_bytes": self.checkpoint_bytes,
            "num_checkpoints": self.num_checkpoints,
            "export_bytes": self.export_bytes,
            "total_bytes": self.total_bytes,
        }


def disk_use(draft: UncheckedPlan, *, total: int, trainable: int) -> DiskUse:
    """Return what a run keeps on disk; arguments as those of `checkpoint_bytes`.

    Source:
        toolkit checkpoint/discovery.py rotate: the oldest goes once the new one is whole; exporter/contents.py: all weights, or
        the adapter alone, in the training precision.
    """
    settings = draft.settings
    width = 4 if settings.precision == "fp32" else 2
    at_once = settings.save_total_limit + 1
    if settings.max_steps is not None:
        at_once = min(at_once, -(-settings.max_steps // settings.save_steps))
    return DiskUse(
        checkpoint_bytes=checkpoint_bytes(draft, total=total, trainable=trainable),
        num_checkpoints=at_once,
        # A little more than it will be with tensor parallelism: what all ranks hold is exported once.
        export_bytes=width * _model_ranks(draft) * (total if draft.job.train.method == "full" else trainable),
    )


def foreseen_disk_use(draft: UncheckedPlan) -> DiskUse | None:
    """Return the same from the model's dimensions alone; None where the architecture is unknown."""
    own, trainable = draft.model.num_parameters, trainable_parameters(draft.job, draft.model)
    if own is None or trainable is None:
        return None
    total = own if draft.job.train.method == "full" else own + trainable
    num_ranks = _model_ranks(draft)
    # Norms and biases, which each tensor rank holds whole, are too few to count.
    return disk_use(draft, total=-(-total // num_ranks), trainable=-(-trainable // num_ranks))


def _model_ranks(draft: UncheckedPlan) -> int:
    """Counts the ranks that share one model."""
    return draft.job.parallel.tensor * draft.job.parallel.pipeline
