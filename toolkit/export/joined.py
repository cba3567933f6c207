"""A checkpoint of several tensor ranks as one of whole tensors, joined when they are read, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from toolkit.errors import CheckpointError, Problem
from toolkit.export.adapter import Weights
from toolkit.export.zero_reader import StoredTensor
from toolkit.modeling.safetensors_folder import some
from toolkit.tensor_parallel.layout import Shard


@dataclass(slots=True)
class JoinedCheckpoint:
    """Whole tensors, put together from what each tensor rank has saved.

    Host memory: the tensor that is read, and one rank's shard of it.

    Args:
        folder: Where they come from, for messages.
        ranks: By tensor rank; all hold the same names.
        shards: How each tensor is cut that is; the others are whole on every rank, and read from rank 0.
    Raises:
        CheckpointError: EXPORT_DAMAGED where the ranks hold other tensors, EXPORT_SHAPE where their shards are not
            those of the model.
    """

    folder: Path
    ranks: Sequence[Weights]
    shards: Mapping[str, Shard]
    tensors: dict[str, StoredTensor] = field(init=False)

    def __post_init__(self) -> None:
        first, *others = (_shapes(weights) for weights in self.ranks)
        for rank, shapes in enumerate(others, start=1):
            if shapes != first:
                raise CheckpointError(_unlike(self.folder, rank, sorted(dict(shapes.items() ^ first.items()))))
        self.tensors = {name: self._whole(name, stored) for name, stored in self.ranks[0].tensors.items()}

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """One whole tensor, in `dtype` if it is a floating-point one."""
        shard = self.shards.get(name)
        if shard is None:
            return self.ranks[0].read(name, dtype)
        return join_shards(partial(self._read_shard, name, dtype), shard, num_ranks=len(self.ranks))

    def _read_shard(self, name: str, dtype: torch.dtype, rank: int) -> Tensor:
        return self.ranks[rank].read(name, dtype)

    def _whole(self, name: str, stored: StoredTensor) -> StoredTensor:
        shard = self.shards.get(name)
        if shard is None:
            return stored
        length = sum(map(len, shard.layout.ranges(0, len(self.ranks))))
        if shard.dim >= len(stored.shape) or stored.shape[shard.dim] != length:
            raise CheckpointError(_of_another_model(name, stored, shard, length))
        shape = list(stored.shape)
        shape[shard.dim] = shard.dense_length
        return replace(stored, shape=tuple(shape))


def join_shards(read: Callable[[int], Tensor], shard: Shard, *, num_ranks: int) -> Tensor:
    """Puts the dense tensor together from its shards: the opposite of `Shard.take`, without a process group.

    What several ranks hold comes from the first of them; padding is left out.

    Args:
        read: Gives a rank's shard; it is called once for each rank that holds something new, and kept no longer.
        shard: How the dense tensor was cut.
        num_ranks: Into so many.
    """
    dense: Tensor | None = None
    placed: set[range] = set()
    for rank in range(num_ranks):
        ranges = shard.layout.ranges(rank, num_ranks)
        if placed.issuperset(ranges):
            continue
        local, start = read(rank), 0
        if dense is None:
            dense = local.new_empty([*local.shape[: shard.dim], shard.dense_length, *local.shape[shard.dim + 1 :]])
        for own in ranges:
            length = min(own.stop, shard.dense_length) - own.start
            if own not in placed and length > 0:
                dense.narrow(shard.dim, own.start, length).copy_(local.narrow(shard.dim, start, length))
            start += len(own)
        placed.update(ranges)
    assert dense is not None, "rank 0 holds something"
    return dense


def _shapes(weights: Weights) -> dict[str, tuple[int, ...]]:
    return {name: stored.shape for name, stored in weights.tensors.items()}


def _unlike(folder: Path, rank: int, names: list[str]) -> Problem:
    return Problem(
        code="EXPORT_DAMAGED",
        key=str(folder),
        message=f"the files of model-parallel rank {rank:02d} in {folder} hold other tensors than those of rank 00: "
        f"they differ at {some(names)}",
        fix="Copy the files of every rank from one and the same run, or export an earlier checkpoint",
    )


def _of_another_model(name: str, stored: StoredTensor, shard: Shard, length: int) -> Problem:
    return Problem(
        code="EXPORT_SHAPE",
        key=name,
        message=f"{name} has shape {stored.shape} on each tensor rank; by the config, dimension {shard.dim} of length "
        f"{shard.dense_length} has {length} there",
        fix="Put the config.json of this very job into the checkpoint's folder model",
    )
