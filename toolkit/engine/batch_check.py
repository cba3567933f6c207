"""Check that ranks received the same batch that share a model or its rows: shards, stages and slices must see the same tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from toolkit.distributed.world import World
from toolkit.errors import RunError
from toolkit.topology.table import name_ranks


def compare_batches(micro_batches: Sequence[Mapping[str, torch.Tensor]], world: World) -> None:
    """Compare the batches of the ranks that share one replica of the model, or each row.

    Args:
        micro_batches: This rank's micro-batches of one step.
        world: Process groups and place of this rank; all ranks of the world call this together.

    Collectives:
        A gather of 32 bytes per rank over the world, so that all ranks raise if one does.

    Raises:
        RunError: TP_BATCH or CONTEXT_BATCH on every rank of the world, naming the ranks that differ.
    """
    digests: list[str | None] = [None] * world.size
    dist.all_gather_object(digests, _digest(micro_batches))
    for group in world.grid.groups("model"):
        others = [rank for rank in group if digests[rank] != digests[group[0]]]
        if others:
            raise RunError.of(
                code="TP_BATCH",
                key="parallel.tensor" if world.grid.pp == 1 else "parallel.pipeline",
                message=f"{name_ranks(others)} got another batch than rank {group[0]} of their replica "
                f"{', '.join(map(str, group))}: the shards of one model would see different tokens",
                fix="Give all ranks of a replica the same batch: choose it by `run.world.coordinate.dp`, not by "
                "rank, or take batches from `run.loader`",
            )
    for group in world.grid.groups("cp"):
        others = [rank for rank in group if digests[rank] != digests[group[0]]]
        if others:
            raise RunError.of(
                code="CONTEXT_BATCH",
                key="parallel.context",
                message=f"{name_ranks(others)} got another batch than rank {group[0]} of their context group "
                f"{', '.join(map(str, group))}: slices of one row would be of different rows",
                fix="Give all ranks of a context group the same whole rows: choose them by `run.world.grid.row_group(rank)`, or take "
                "batches from `run.loader`",
            )


def _digest(micro_batches: Sequence[Mapping[str, torch.Tensor]]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for batch in micro_batches:
        for name in sorted(batch):
            value = batch[name].detach().cpu().contiguous()
            digest.update(f"{name}{tuple(value.shape)}{value.dtype}".encode())
            digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
