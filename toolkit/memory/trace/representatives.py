"""The kinds of decoder layers, and the fewest layers whose trace represents all."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from toolkit.introspect import layer_lists

# Attributes of vision towers that name layers by their indices: those with whole attention, and those whose output is used too.
_BY_INDEX = ("fullatt_block_indexes", "deepstack_visual_indexes")
# Module path inside a layer and attribute that numbers it, with the distance from the layer's index.
Numbering = dict[tuple[str, str], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStack:
    """A list of layers that run one after the other.

    Args:
        prefix: Path of the list, such as `model.layers`.
        kept: Original indices of the traced layers, ascending.
        stands_for: For each original layer, the position in `kept` of the layer that represents it.
        first: Original index of the first layer; above 0 for a stage of a pipeline.
        offset: Position of the first traced layer in the list of the traced model.
    """

    prefix: str
    kept: tuple[int, ...]
    stands_for: tuple[int, ...]
    first: int = 0
    offset: int = 0

    @property
    def num_layers(self) -> int:
        """Layers that the traced ones represent: of the whole model, or of a stage."""
        return len(self.stands_for)

    def count(self, position: int) -> int:
        """Return how many layers a traced one represents; 0 if it is only traced as a neighbour of others."""
        return self.stands_for.count(position)


def find_stacks(
    model: nn.Module, *, all_layers: bool = False, checkpointed: Sequence[nn.Module] = ()
) -> list[LayerStack]:
    """Find the layer lists of a model and how few of their layers must be traced.

    A layer represents another if both have the same structure and so have their neighbours: memory passed from layer
    to layer depends on no more.

    Args:
        model: Hugging Face model; no storage is needed.
        all_layers: Whether to keep every layer.
        checkpointed: Layers that recompute, and so differ from others.
    """
    stacks: list[LayerStack] = []
    for name, layers in layer_lists(model).items():
        count = len(layers)
        if count < 2:
            continue
        if all_layers:
            kept = stands_for = tuple(range(count))
        else:
            kept, stands_for = select_representatives(kinds_of(model, layers, checkpointed=checkpointed, prefix=name))
        stacks.append(LayerStack(prefix=name, kept=kept, stands_for=stands_for))
    return stacks


def kinds_of(
    model: nn.Module, layers: nn.ModuleList, *, checkpointed: Sequence[nn.Module] = (), prefix: str = ""
) -> list[Hashable]:
    """Return the kind of each layer of a list: structure, entries in the configuration's lists, place, and whether it recomputes."""
    numbering = numbering_of(layers)
    types = layer_types(model, len(layers))
    recompute = set(map(id, checkpointed))
    places = _places(model, prefix, len(layers))
    return [
        (_structure(layer, numbering), types[index], places[index], id(layer) in recompute)
        for index, layer in enumerate(layers)
    ]


def _places(model: Any, prefix: str, count: int) -> list[Hashable]:
    """Return what the module around a list of layers does with each by its index alone, as vision towers do.

    Layers between two whose output is used too stand for no others: what uses it runs between them.

    Source:
        transformers models/qwen2_5_vl/modeling_qwen2_5_vl.py (whole attention), models/qwen3_vl/modeling_qwen3_vl.py (features
        that the first decoder layers add), models/llava/modeling_llava.py get_image_features (a layer before the last).
    """
    owner = model.get_submodule(prefix.rpartition(".")[0]) if prefix else model
    whole, taken = (getattr(owner, name, None) or () for name in _BY_INDEX)
    config = getattr(model, "config", None)
    tower = getattr(config, "vision_config", None)
    added = 0 if taken else len(getattr(tower, _BY_INDEX[1], None) or ())
    if tower is not None and "vision" in prefix:
        taken = (*taken, *_features(getattr(config, "vision_feature_layer", None), count))
    return [
        (
            index in whole,
            index if index in taken else None,
            sum(each < index for each in taken),
            index if index < added else None,
        )
        for index in range(count)
    ]


def _features(named: Any, count: int) -> list[int]:
    """Return the layers whose outputs a model's `vision_feature_layer` names: of the inputs of all layers and the last output, by place."""
    places = [named] if isinstance(named, int) else list(named or ())
    return [place + count if place < 0 else place - 1 for place in places]


def select_representatives(kinds: Sequence[Hashable]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return few layers among which each layer has an equal one with equal neighbours.

    The kept layers are the original sequence with loops removed: what lies between two equal layers with equal
    neighbours is left out if none of it appears there for the first time.

    Returns:
        The indices to keep, ascending, and for each index the position of its representative among them. The first
        layer of each kind is kept, and represents itself.

    >>> select_representatives("AAAAAAAA")
    ((0, 1, 7), (0, 1, 1, 1, 1, 1, 1, 2))
    >>> select_representatives("DDMMMM")[0]
    (0, 1, 2, 3, 5)
    """
    ends: list[Hashable] = [None, *kinds, None]
    contexts = [tuple(ends[index : index + 3]) for index in range(len(kinds))]
    kept: list[int] = []
    first: dict[Hashable, int] = {}
    newest = -1  # position of the last context that appeared for the first time
    for index, context in enumerate(contexts):
        if context not in first:
            kept.append(index)
            newest = first[context] = len(kept) - 1
            continue
        back = max(position for position, kept_index in enumerate(kept) if contexts[kept_index] == context)
        if back >= newest:
            del kept[back + 1 :]
        else:
            kept.append(index)
    return tuple(kept), tuple(first[context] for context in contexts)


def prune_layers(model: nn.Module, stacks: Sequence[LayerStack]) -> None:
    """Keep only the traced layers in a model, and only their entries in the configuration's lists."""
    for stack in stacks:
        if len(stack.kept) == stack.num_layers:
            continue
        layers = model.get_submodule(stack.prefix)
        assert isinstance(layers, nn.ModuleList)
        numbering = numbering_of(layers)
        _put(model, stack.prefix, nn.ModuleList(layers[index] for index in stack.kept))
        _renumber(model, stack, numbering)


def copy_pruned(
    model: nn.Module, stack: LayerStack, numbering: Numbering, along: Sequence[nn.Module]
) -> tuple[Any, list[nn.Module]]:
    """Return a copy of a model with the traced layers alone, and the copies of some of its modules.

    Args:
        model: Whole model, which stays as it is; no other layer is copied.
        stack: Layers to keep.
        numbering: That of all layers.
        along: Modules inside the layers that are kept.
    """
    layers: Any = model.get_submodule(stack.prefix)
    _put(model, stack.prefix, nn.ModuleList(layers[index] for index in stack.kept))
    try:
        made, found = copy.deepcopy((model, list(along)))
    finally:
        _put(model, stack.prefix, layers)
    _renumber(made, stack, numbering)
    return made, found


def _put(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def _renumber(model: nn.Module, stack: LayerStack, numbering: Numbering) -> None:
    """Let the layers that are left count from 0, and the configuration list them alone."""
    layers: Any = model.get_submodule(stack.prefix)
    for position, layer in enumerate(layers):
        modules = dict(layer.named_modules())
        for (path, attribute), shift in numbering.items():
            if path in modules and hasattr(modules[path], attribute):
                setattr(modules[path], attribute, position + shift)
    _select(_config_of(model, stack.prefix), stack)
    owner: Any = model.get_submodule(stack.prefix.rpartition(".")[0])
    for name in _BY_INDEX:
        if (listed := getattr(owner, name, None)) is not None:
            setattr(owner, name, [position for position, index in enumerate(stack.kept) if index in listed])


def in_adapters(model: nn.Module, stack: LayerStack) -> LayerStack:
    """Return a stack with its path inside adapters, which wrap the model."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and (name == stack.prefix or name.endswith(f".{stack.prefix}")):
            return replace(stack, prefix=name)
    raise AssertionError(stack.prefix)


def _config_of(model: nn.Module, path: str) -> Any:
    """Return the configuration of the innermost module on a path that has one."""
    parts = path.split(".")
    around = [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts))]
    return next((module.config for module in reversed(around) if hasattr(module, "config")), None)


def numbering_of(layers: nn.ModuleList) -> Numbering:
    """Find the attributes that number the layers, such as `layer_idx`: they do not make layers differ."""
    shifts: dict[tuple[str, str], list[int]] = {}
    for index, layer in enumerate(layers):
        for key, value in _plain(layer):
            # True and False would count from 0 to 1.
            if isinstance(value, int) and not isinstance(value, bool):
                shifts.setdefault(key, []).append(value - index)
    return {key: found[0] for key, found in shifts.items() if len(found) > 1 and len(set(found)) == 1}


def _plain(layer: nn.Module) -> Iterator[tuple[tuple[str, str], Any]]:
    """Yield the attributes of plain type of a layer's modules."""
    for path, module in layer.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, bool | int | float | str) and name != "training":
                yield (path, name), value


def _structure(layer: nn.Module, numbering: Numbering) -> Hashable:
    """Return the structure of a layer: its modules, their plain attributes, and the shapes of their parameters."""
    modules = tuple((path, type(module)) for path, module in layer.named_modules())
    plain = tuple((key, value) for key, value in _plain(layer) if key not in numbering)
    tensors = tuple(
        (name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        for tensors in (layer.named_parameters(), layer.named_buffers())
        for name, tensor in tensors
    )
    return modules, plain, tensors


def _select(config: Any, stack: LayerStack) -> None:
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == stack.num_layers:
            setattr(config, name, [value[index] for index in stack.kept])
    number = getattr(type(config), "attribute_map", {}).get("num_hidden_layers", "num_hidden_layers")
    if getattr(config, number, None) == stack.num_layers:
        setattr(config, number, len(stack.kept))


def _configs(model: nn.Module) -> list[Any]:
    """Return the distinct configuration objects of a model's modules."""
    found = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    return list(found.values())


def layer_types(model: nn.Module, count: int) -> list[tuple[str, ...]]:
    """Return the entries of each layer in the configuration's lists."""
    lists = [
        value
        for config in _configs(model)
        for value in vars(config).values()
        if isinstance(value, list) and len(value) == count
    ]
    return [tuple(str(values[index]) for values in lists) for index in range(count)]
