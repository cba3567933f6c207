"""Disk space of all that a run keeps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from toolkit.config.job import Train
from toolkit.planning.settings import steps_between
from toolkit.planning.state_bytes import written_bytes
from toolkit.planning.unchecked_plan import UncheckedPlan, trainable_parameters

# Larger files are hashed by parts of this size, so that several threads hash one file, while it is written and when it is read.
PART_BYTES = 16 * 2**20
# Threads of a rank that write a checkpoint, at most: as many as hash, and compute the CRC-32 of, what a local NVMe writes, 2 to 4 GB/s.
MOST_SAVE_THREADS = 8
# Memory through which a rank writes a checkpoint, at most: a part for each thread, and the one that is being filled.
SAVE_BUFFER_BYTES = (MOST_SAVE_THREADS + 1) * PART_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskUse:
    """What a run writes to `train.output_dir`, without its logs and tokenized data.

    Args:
        checkpoint_bytes: Size of one checkpoint over all ranks.
        num_checkpoints: Most checkpoints on disk at once: those that are kept, and the one being written.
        export_bytes: Size of the safetensors files exported at the end.
    """

    checkpoint_bytes: int
    num_checkpoints: int
    export_bytes: int

    @property
    def total_bytes(self) -> int:
        """Most disk space used at once; a run resumed after its export has all of it."""
        return self.num_checkpoints * self.checkpoint_bytes + self.export_bytes

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as a JSON object."""
        return {
            "checkpoint_bytes": self.checkpoint_bytes,
            "num_checkpoints": self.num_checkpoints,
            "export_bytes": self.export_bytes,
            "total_bytes": self.total_bytes,
        }


def exports_whole(train: Train) -> bool:
    """Return whether an export has all weights, not those of adapters alone."""
    return train.method == "full" or train.changes_base


def disk_use(draft: UncheckedPlan, *, total: int, trainable: int) -> DiskUse:
    """Return what a run keeps on disk.

    Args:
        draft: Plan with the stage, precision and optimizer.
        total: Parameters of one rank, adapters included; without tensor or pipeline parallelism, those of the model.
        trainable: Trained parameters among them.

    Source:
        toolkit checkpoint/discovery.py rotate: the oldest is removed once the new one is complete;
        exporter/contents.py: all weights, or the adapter alone, in the training precision.
    """
    settings, ranks = draft.settings, draft.job.model_ranks
    at_once = settings.save_total_limit + 1
    if draft.job.train.load_best_model_at_end and settings.save_total_limit == 1:
        at_once += 1  # the best one beside the last
    if settings.max_steps is not None:
        at_once = min(at_once, -(-settings.max_steps // steps_between(settings.save_steps, settings.max_steps)))
    elif settings.save_steps < 1:
        at_once = min(at_once, math.ceil(1 / settings.save_steps))
    return DiskUse(
        checkpoint_bytes=written_bytes(draft, total=ranks * total, trainable=ranks * trainable),
        num_checkpoints=at_once,
        # Slightly too much with tensor parallelism: replicated parameters are exported once.
        export_bytes=settings.itemsize * ranks * (total if exports_whole(draft.job.train) else trainable),
    )


def foreseen_disk_use(draft: UncheckedPlan) -> DiskUse | None:
    """Return the disk use computed from the model's dimensions alone; None where the architecture is unknown."""
    own, trainable = draft.model.num_parameters, trainable_parameters(draft.job, draft.model)
    if own is None or trainable is None:
        return None
    total = own if draft.job.train.method == "full" else own + trainable
    num_ranks = draft.job.model_ranks
    # Norms and biases, which are replicated on the tensor ranks, are too few to count.
    return disk_use(draft, total=-(-total // num_ranks), trainable=-(-trainable // num_ranks))
