"""The shards of a stage's tensor ranks as one checkpoint of whole tensors, each joined when it is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from toolkit.errors import CheckpointError, Problem
from toolkit.exporter.adapter import Weights, read_part
from toolkit.exporter.zero_reader import StoredTensor
from toolkit.modeling.safetensors_folder import some
from toolkit.tensor_parallel.layout import Shard


@dataclass(slots=True)
class JoinedCheckpoint:
    """Whole tensors of a stage, joined from the shards of its tensor ranks; unchanged for a single rank.

    Host memory: the tensor that is read, and one rank's shard of it.

    Args:
        folder: Checkpoint folder, for messages.
        ranks: Checkpoints by tensor rank; all have the same tensors, and the first records which of them share storage.
        shards: Shard of each sharded tensor; the others are replicated, and read from the first rank.
        first_rank: Model-parallel rank of the first of `ranks`, for messages.
    Raises:
        CheckpointError: EXPORT_DAMAGED if the ranks have different tensors, EXPORT_SHAPE if their shards are not
            those of the model.
    """

    folder: Path
    ranks: Sequence[Weights]
    shards: Mapping[str, Shard]
    first_rank: int = 0
    tensors: dict[str, StoredTensor] = field(init=False)

    def __post_init__(self) -> None:
        first, *others = self.ranks
        for rank, weights in enumerate(others, start=self.first_rank + 1):
            unlike = sorted(_differences(first.tensors, weights.tensors))
            if unlike:
                raise CheckpointError(_unlike(self.folder, rank, self.first_rank, unlike))
        self.tensors = {name: self._whole(name, stored) for name, stored in first.tensors.items()}

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return one whole tensor, in `dtype` if it is a floating-point one."""
        shard = self.shards.get(name)
        if shard is None:
            return self.ranks[0].read(name, dtype)
        read = partial(self._read_shard, self.tensors[name].owner, dtype)
        return join_shards(read, shard, num_ranks=len(self.ranks))

    def read_part(self, name: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Return elements [start, stop) of a tensor, row by row; of one that is sharded all are read."""
        if name in self.shards:
            return self.read(name, dtype).reshape(-1)[start:stop]
        return read_part(self.ranks[0], name, start, stop, dtype)

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
    """Join the dense tensor from its shards: the inverse of `Shard.take`, without a process group.

    Parts replicated on several ranks come from the first of them; padding is dropped.

    Args:
        read: Returns a rank's shard; called once for each rank with a new part, and the shard is not kept.
        shard: Shard that describes how the dense tensor was split.
        num_ranks: Number of ranks that it was split into.
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


def _differences(first: Mapping[str, StoredTensor], other: Mapping[str, StoredTensor]) -> set[str]:
    """Return names of tensors that another rank lacks, has in another shape, or has in addition.

    Under stage 3 DeepSpeed's global rank 0 alone writes which names share a tensor (runtime/engine.py
    _get_shared_params): the others' files have the first name only.
    """
    owners = {stored.owner: first[stored.owner].shape for stored in first.values()}
    unlike = {name for name, shape in owners.items() if name not in other or other[name].shape != shape}
    return unlike | (other.keys() - first.keys())


def _unlike(folder: Path, rank: int, first: int, names: list[str]) -> Problem:
    return Problem(
        code="EXPORT_DAMAGED",
        key=str(folder),
        message=f"the files of model-parallel rank {rank:02d} in {folder} have other tensors than those of rank "
        f"{first:02d}: they differ at {some(names)}",
        fix="Copy the files of every rank from the same run, or export an earlier checkpoint",
    )


def _of_another_model(name: str, stored: StoredTensor, shard: Shard, length: int) -> Problem:
    return Problem(
        code="EXPORT_SHAPE",
        key=name,
        message=f"{name} has shape {stored.shape} on each tensor rank; by the config, dimension {shard.dim} of length "
        f"{shard.dense_length} has {length} there",
        fix="Put this job's config.json into the checkpoint's `model` folder",
    )
