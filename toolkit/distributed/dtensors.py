"""Weights that torch shards over the ranks of a device mesh, as FSDP2 does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_dtensor(weight: Tensor) -> bool:
    """Return whether each rank of a mesh holds a part of a tensor, without an import of torch's DTensor.

    Source:
        torch distributed/tensor/_api.py DTensor.placements.
    """
    return hasattr(weight, "placements")


def whole_of(weight: Tensor) -> Tensor:
    """Return a tensor, gathered if each rank of a mesh holds a part of it.

    Collectives:
        An all-gather over the mesh of one that is sharded.
    """
    return weight.full_tensor() if is_dtensor(weight) else weight  # type: ignore[attr-defined]


@torch.no_grad()
def copy_whole(target: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor, which this rank has, into one of which it may hold a part only.

    Args:
        target: Plain tensor, or one that is sharded over a mesh.
        whole: Values of the whole tensor, of its shape; cast to its dtype and device.
    """
    if not is_dtensor(target):
        target.data.copy_(whole)
        return
    sharded: Any = target
    part = whole
    for dim, placement in enumerate(sharded.placements):
        if (
            placement.is_shard()
        ):  # as torch's Shard cuts: in equal pieces, of which the last ranks may have fewer or none
            pieces = part.chunk(sharded.device_mesh.size(dim), dim=placement.dim)
            own = sharded.device_mesh.get_local_rank(dim)
            part = pieces[own] if own < len(pieces) else part.narrow(placement.dim, 0, 0)
    sharded.to_local().copy_(part)  # views until here: nothing else is allocated
