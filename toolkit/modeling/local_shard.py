"""The part of a model that this rank of a tensor group or pipeline owns: sliced from whole tensors, or read on its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from toolkit.modeling.conversion import ConversionGroup, convert_group, own_sources, source_shards
from toolkit.modeling.safetensors_folder import SafetensorsFolder
from toolkit.pipeline_parallel.part import stage_info
from toolkit.tensor_parallel.apply import parameter_shards
from toolkit.tensor_parallel.layout import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalShard:
    """Which weights of the whole model this rank owns, and which part of each.

    Args:
        shards: Shards by key of the whole model; other weights are whole.
        tp_group: Ranks that have the other shards; `None` if no weight is sharded.
        own_keys: Keys of this rank's model by key of the whole model with the same values; they differ for the head of a
            tied model without its embedding. `None` if the rank has all weights.
    """

    shards: Mapping[str, Shard]
    tp_group: dist.ProcessGroup | None
    own_keys: Mapping[str, str] | None = None

    @classmethod
    def of(cls, model: nn.Module, dense: nn.Module | None) -> LocalShard:
        """Find the part of its dense twin in a model after `apply_tensor_parallel`, `split_model` or both.

        Raises:
            ValueError: If the model is sharded or split and has no twin.
        """
        shards, is_cut = parameter_shards(model), stage_info(model) is not None
        if not shards and not is_cut:
            return cls(shards={}, tp_group=None)
        if dense is None:
            raise ValueError("a model that is sharded or split needs its dense copy: dense=, on the meta device")
        own_keys = _own_keys(model, dense) if is_cut else None
        if own_keys is not None:
            shards = {key: shards[own] for key, own in own_keys.items() if own in shards}
        groups: list[Any] = [getattr(module, "tp_group", None) for module in model.modules()]
        return cls(
            shards=shards,
            tp_group=next(group for group in groups if group is not None) if shards else None,
            own_keys=own_keys,
        )

    def local_key(self, key: str) -> str | None:
        """Return this rank's key for a key of the whole model; `None` if another rank has it."""
        return key if self.own_keys is None else self.own_keys.get(key)

    def take(self, key: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor."""
        shard = self.shards.get(key)
        if shard is None:
            return whole
        rank, num_ranks = self._place
        return shard.take(whole, rank=rank, num_ranks=num_ranks)

    def read(
        self,
        files: SafetensorsFolder,
        group: ConversionGroup,
        keys: tuple[str, ...],
        *,
        dense: nn.Module,
        targets: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """Read this rank's part of the model tensors that a group of checkpoint tensors converts to.

        Only the bytes of the part are read, unless the conversion of the group does not commute with slicing: such a group is
        read whole.

        Args:
            files: Tensors of the checkpoint.
            group: Checkpoint tensors that are converted together.
            keys: Model keys to return.
            dense: Whole model, of which only the config is read.
            targets: Meta tensors of the whole shape by model key.
        """
        own = self._own_group(files, group, keys, dense=dense, targets=targets)
        if own is not None:
            return convert_group(dense, own, {key: files.read(key) for key in own.keys}, targets)
        cuts = self._source_shards(files, group, keys, dense=dense, targets=targets)
        if cuts is None:
            converted = convert_group(dense, group, {key: files.read(key) for key in group.keys}, targets)
            return {key: self.take(key, converted[key]) for key in keys}
        converted = convert_group(
            dense, group, {key: self._slice(files, key, cuts[key]) for key in group.keys}, targets
        )
        return {key: converted[key] for key in keys}

    def _own_group(
        self,
        files: SafetensorsFolder,
        group: ConversionGroup,
        keys: tuple[str, ...],
        *,
        dense: nn.Module,
        targets: Mapping[str, Tensor],
    ) -> ConversionGroup | None:
        """Return the part of a group that this rank's shard is made of, tried on meta tensors; `None` if it has parts of each tensor."""
        if len(keys) > 1 or keys[0] not in self.shards:
            return None
        rank, num_ranks = self._place
        own = own_sources(group, self.shards[keys[0]], rank=rank, num_ranks=num_ranks)
        if own is None:
            return None
        found = convert_group(dense, own, {key: files.metas[key] for key in own.keys}, targets)
        return own if found[keys[0]].shape == self.take(keys[0], targets[keys[0]]).shape else None

    def _source_shards(
        self,
        files: SafetensorsFolder,
        group: ConversionGroup,
        keys: tuple[str, ...],
        *,
        dense: nn.Module,
        targets: Mapping[str, Tensor],
    ) -> dict[str, Shard] | None:
        """Return how to slice each tensor of a group; `None` if it must be read whole. Both are tried on meta tensors."""
        cut = [key for key in keys if key in self.shards]
        if not cut or len(keys) > 1:
            return None
        shards = source_shards(group, self.shards[cut[0]])
        if shards is None or any(files.metas[key].shape[shards[key].dim] != shards[key].dense_length for key in shards):
            return None
        rank, num_ranks = self._place
        metas = {key: shard.take(files.metas[key], rank=rank, num_ranks=num_ranks) for key, shard in shards.items()}
        found = convert_group(dense, group, metas, targets)[cut[0]]
        return shards if found.shape == self.take(cut[0], targets[cut[0]]).shape else None

    def _slice(self, files: SafetensorsFolder, key: str, shard: Shard) -> Tensor:
        rank, num_ranks = self._place
        ranges = shard.layout.ranges(rank, num_ranks)
        end = shard.dense_length
        own = files.read_ranges(key, dim=shard.dim, ranges=[range(min(r.start, end), min(r.stop, end)) for r in ranges])
        padding = sum(map(len, ranges)) - own.shape[shard.dim]
        return functional.pad(own, (0, 0) * (own.dim() - 1 - shard.dim) + (0, padding)) if padding else own

    @property
    def _place(self) -> tuple[int, int]:
        assert self.tp_group is not None, "what is cut lies on the ranks of a group"
        return self.tp_group.rank(), self.tp_group.size()


def _own_keys(model: nn.Module, dense: nn.Module) -> dict[str, str]:
    """Return a split model's key for each key of its twin; tied keys of the twin are at most one weight of the model."""
    info = stage_info(model)
    assert info is not None, "the model is cut"
    held = model.state_dict(keep_vars=True)
    whole = dense.state_dict(keep_vars=True)
    keys: dict[int, list[str]] = {}
    for key, value in whole.items():
        keys.setdefault(id(value), []).append(key)
    found = {key: key for key in whole if key in held}
    if info.tied_key is not None:
        found |= dict.fromkeys(keys[id(whole[info.tied_key])], info.tied_key)
    return found
