"""Conversion between checkpoint keys and model keys; only this module uses the weight conversion of transformers 5.

Since version 5 a model may store weights differently from its checkpoints (the experts of a layer are one stacked
parameter, the files have one tensor per expert). transformers converts in `core_model_loading.py` by rules in
`conversion_mapping.py`; here the same rules are applied group by group, so that the whole model is never in memory.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)

from toolkit.tensor_parallel.layout import Layout, Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionGroup:
    """Checkpoint tensors that are converted to model tensors together.

    Args:
        name: Model key, the first one if there are several.
        sources: Checkpoint keys with the rule's pattern that each matches, in the order in which the rule stacks them.
        converter: Rule of transformers, or `None` if the key is at most renamed.
    """

    name: str
    sources: tuple[tuple[str, str], ...]
    converter: Any = None

    @property
    def keys(self) -> tuple[str, ...]:
        """The checkpoint keys."""
        return tuple(key for key, _ in self.sources)


def group_checkpoint_keys(
    model: nn.Module, keys: Iterable[str], targets: Mapping[str, Tensor]
) -> tuple[tuple[ConversionGroup, ...], tuple[str, ...]]:
    """Group checkpoint keys that are converted together.

    Args:
        model: A transformers model, on any device.
        keys: Keys of the checkpoint.
        targets: Tensors of the full shape by model key; meta tensors suffice.
    Returns:
        The groups in natural order, and the keys that belong to no tensor of the model. Keys saved from the base
        model (without its prefix), and the reverse, are matched as in `from_pretrained`.
    """
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix = getattr(model, "base_model_prefix", None) or None
    sources: dict[str, list[tuple[str, str]]] = {}
    rule_of: dict[str, Any] = {}
    unmatched: list[str] = []
    for key in sorted(keys, key=natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, targets)
        if name not in targets and (key in targets or f"{prefix}.{key}" in targets):
            name, pattern = rename_source_key(key, [], [], prefix, targets)
        if name not in targets or (pattern is None and name in sources):
            unmatched.append(key)
            continue
        rule_of.setdefault(name, None if pattern is None else by_pattern[pattern])
        sources.setdefault(name, []).append((key, pattern or key))
    groups = (
        ConversionGroup(name=name, sources=tuple(members), converter=rule_of[name]) for name, members in sources.items()
    )
    return tuple(groups), tuple(unmatched)


def convert_group(
    model: nn.Module, group: ConversionGroup, tensors: Mapping[str, Tensor], targets: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Convert the tensors of one group to model tensors; meta tensors are converted to meta tensors.

    Args:
        model: Model, of which only the config is read.
        group: Group from `group_checkpoint_keys`.
        tensors: Tensors by checkpoint key, at least those of `group.keys`.
        targets: Tensors of the full shape by model key: under ZeRO-3 those of the model itself are empty.
    """
    if group.converter is None:
        return {group.name: tensors[group.keys[0]]}
    converter = copy.deepcopy(group.converter)
    for key, pattern in group.sources:
        converter.add_tensor(group.name, key, pattern, tensors[key])
    shaped = _FullShapes(model, targets)
    converted = converter.convert(group.name, model=shaped, config=getattr(model, "config", None))
    return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}


def source_shards(group: ConversionGroup, shard: Shard) -> dict[str, Shard] | None:
    """Return how to shard a group's checkpoint tensors so that they convert to the shard of its only model tensor.

    Stacking and concatenation commute with sharding: of experts stacked along a new dim, each is sharded along the next dim;
    of tensors concatenated along the sharded dim, each is one part of the layout; of experts stacked along the sharded dim, a rank has
    some of them whole (`own_sources`).

    Args:
        group: Group from `group_checkpoint_keys`.
        shard: Shard of the model tensor.
    Returns:
        Shards by checkpoint key; `None` for a rule with any other operation.
    """
    if group.converter is None:
        return {group.keys[0]: shard}
    found = {pattern for _, pattern in group.sources}
    patterns = [pattern for pattern in group.converter.source_patterns if pattern in found]
    cuts = dict.fromkeys(patterns, shard)
    for operation in reversed(group.converter.operations):
        cuts = _before(operation, cuts)
        if not cuts:
            return None
    return {key: cuts[pattern] for key, pattern in group.sources}


def own_sources(group: ConversionGroup, shard: Shard, *, rank: int, num_ranks: int) -> ConversionGroup | None:
    """Return a group of those checkpoint tensors alone that convert to a rank's shard of the group's only model tensor.

    Args:
        group: Group from `group_checkpoint_keys`.
        shard: Shard of the model tensor.
        rank: Rank that has the shard.
        num_ranks: Number of ranks that share the tensor.
    Returns:
        The smaller group; `None` unless its rule stacks one tensor for each element of the sharded dim, as those of experts do.
    """
    operations = [] if group.converter is None else group.converter.operations
    stacked = [operation.dim for operation in operations if type(operation) is MergeModulelist]
    joined = [operation.dim for operation in operations if type(operation) is Concatenate]
    if stacked != [shard.dim] or shard.dim in joined or len(operations) > len(stacked) + len(joined):
        return None
    members: dict[str, list[tuple[str, str]]] = {}
    for source in group.sources:
        members.setdefault(source[1], []).append(source)
    if any(len(sources) != shard.dense_length for sources in members.values()):
        return None
    ranges = shard.layout.ranges(rank, num_ranks)
    return replace(
        group, sources=tuple(sources[place] for sources in members.values() for own in ranges for place in own)
    )


def _before(operation: Any, cuts: Mapping[str, Shard]) -> dict[str, Shard]:
    """Return the shards of an operation's inputs, by pattern, from those of its outputs; empty if not known."""
    shard = next(iter(cuts.values()))
    if type(operation) is MergeModulelist and 0 <= operation.dim < shard.dim:
        return {pattern: replace(cut, dim=cut.dim - 1) for pattern, cut in cuts.items()}
    if type(operation) is Concatenate and operation.dim == shard.dim:
        parts = shard.layout.parts
        if len(parts) == len(cuts) and shard.layout.num_blocks == 1 and shard.layout.length == shard.dense_length:
            return {
                pattern: Shard(dim=shard.dim, layout=Layout(parts=(part,)), dense_length=part.length)
                for pattern, part in zip(cuts, parts, strict=True)
            }
    return {}


def revert(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert model tensors to those that `save_pretrained` writes: checkpoint keys, one tensor per expert.

    Args:
        model: Model, or its twin on the meta device.
        tensors: Tensors by model key; all of one group of `group_model_keys`.
    """
    return dict(revert_weight_conversion(model, dict(tensors)))


def group_model_keys(model: nn.Module, metas: Mapping[str, Tensor]) -> tuple[tuple[str, ...], ...]:
    """Group model keys into the smallest groups that `revert` can convert one by one.

    A key is its own group if reverting it by itself gives the same tensors as reverting its layer as a whole; otherwise its
    layer is one group.

    Args:
        model: Model, or its twin on the meta device.
        metas: Meta tensors by model key.
    """
    rules = get_model_conversion_mapping(model, add_legacy=False)
    if not any(isinstance(rule, WeightConverter) for rule in rules):
        return tuple((key,) for key in metas)
    layers: dict[str, list[str]] = {}
    for key in metas:
        match = re.match(r".*?\.\d+\.", key)
        layers.setdefault(match.group() if match else "", []).append(key)
    groups: list[tuple[str, ...]] = []
    for keys in layers.values():
        groups.extend(_split_layer(model, keys, metas))
    return tuple(groups)


def _split_layer(model: nn.Module, keys: Sequence[str], metas: Mapping[str, Tensor]) -> list[tuple[str, ...]]:
    whole = {name: value.shape for name, value in revert(model, {key: metas[key] for key in keys}).items()}
    alone: dict[str, torch.Size] = {}
    for key in keys:
        try:
            alone |= {name: value.shape for name, value in revert(model, {key: metas[key]}).items()}
        except Exception:  # a rule that needs several tensors fails on one, with any exception
            return [tuple(keys)]
    return [(key,) for key in keys] if alone == whole else [tuple(keys)]


def natural_key(key: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key that puts `layers.2` before `layers.10`, so that experts are stacked in order."""
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)|\.", key) if part)


class _FullShapes:
    """Stand-in for the model when a rule reads a parameter's size: under ZeRO-3 those of the model are empty."""

    def __init__(self, model: nn.Module, targets: Mapping[str, Tensor]) -> None:
        self._model = model
        self._targets = targets

    def get_parameter(self, name: str) -> Tensor:
        return self._targets[name]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
