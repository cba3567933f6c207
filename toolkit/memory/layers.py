"""Which decoder layers are alike, and the fewest of them whose trace stands for all."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

# Attributes that number a layer without changing what it does.
_NUMBERING = frozenset({"layer_idx", "layer_id", "layer_index", "block_idx", "training"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A list of layers that run one after the other.

    Args:
        prefix: Path of the list, such as `model.layers`.
        kept: Original indices of the layers that are traced, ascending.
        stands_for: For each original layer, the position among `kept` of the layer that represents it.
    """

    prefix: str
    kept: tuple[int, ...]
    stands_for: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        """Layers of the whole model."""
        return len(self.stands_for)


def find_stacks(model: nn.Module) -> list[Stack]:
    """Finds the layer lists of a model and how few of their layers must be traced.

    A layer stands for another if both have the same structure and so have their neighbours: memory handed from layer
    to layer depends on no more.
    """
    stacks = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) < 2:
            continue
        if not all(isinstance(layer, GradientCheckpointingLayer) for layer in module):
            continue
        types = _layer_types(model, len(module))
        kinds = [(_structure(layer), types[index]) for index, layer in enumerate(module)]
        kept, stands_for = shorten(kinds)
        stacks.append(Stack(prefix=name, kept=kept, stands_for=stands_for))
    return stacks


def shorten(kinds: Sequence[Hashable]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Gives the fewest layers in which every layer finds its like between like neighbours.

    Returns:
        The indices to keep, and for each index the position of its representative among them.

    >>> shorten("AAAAAAAA")
    ((0, 1, 7), (0, 1, 1, 1, 1, 1, 1, 2))
    >>> shorten("DDMMMM")[0]
    (0, 1, 2, 3, 5)
    """
    ends: list[Hashable] = [None, *kinds, None]
    contexts = [tuple(ends[index : index + 3]) for index in range(len(kinds))]
    kept: list[int] = []
    place: dict[Hashable, int] = {}
    newest = -1  # position of the last context that was seen for the first time
    for index, context in enumerate(contexts):
        at = place.get(context)
        if at is None:
            kept.append(index)
            newest = place[context] = len(kept) - 1
            continue
        positions = [position for position, kept_index in enumerate(kept) if contexts[kept_index] == context]
        back = max(positions)
        if back >= newest:
            del kept[back + 1 :]
        else:
            kept.append(index)
    first = {contexts[kept_index]: position for position, kept_index in reversed(list(enumerate(kept)))}
    return tuple(kept), tuple(first[context] for context in contexts)


def prune(model: nn.Module, stacks: Sequence[Stack]) -> None:
    """Leaves only the kept layers in a model, and only their entries in the configuration's lists."""
    for stack in stacks:
        parent, _, name = stack.prefix.rpartition(".")
        layers = model.get_submodule(stack.prefix)
        assert isinstance(layers, nn.ModuleList)
        setattr(model.get_submodule(parent), name, nn.ModuleList(layers[index] for index in stack.kept))
        for position, index in enumerate(stack.kept):
            _renumber(layers[index], index, position)
        for config in _configs(model):
            _select(config, stack)


def _renumber(layer: nn.Module, old: int, new: int) -> None:
    for module in layer.modules():
        for name in _NUMBERING & vars(module).keys():
            if getattr(module, name) == old and name != "training":
                setattr(module, name, new)


def _select(config: Any, stack: Stack) -> None:
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == stack.num_layers:
            setattr(config, name, [value[index] for index in stack.kept])
    names = {getattr(type(config), "attribute_map", {}).get("num_hidden_layers", "num_hidden_layers"), "num_layers"}
    for name in names & vars(config).keys():
        if getattr(config, name) == stack.num_layers:
            setattr(config, name, len(stack.kept))


def _configs(model: nn.Module) -> list[Any]:
    """Gives the distinct configuration objects of a model's modules."""
    found = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    return list(found.values())


def _layer_types(model: nn.Module, count: int) -> list[tuple[Any, ...]]:
    """Gives what the configuration's lists say of each layer."""
    lists = [
        value
        for config in _configs(model)
        for value in vars(config).values()
        if isinstance(value, list) and len(value) == count
    ]
    return [tuple(str(values[index]) for values in lists) for index in range(count)]


def _structure(layer: nn.Module) -> Hashable:
    """Describes a layer: its modules, their plain attributes, and the shapes of their parameters."""
    parts: list[Hashable] = []
    for name, module in layer.named_modules():
        plain = tuple(
            sorted(
                (key, value)
                for key, value in vars(module).items()
                if isinstance(value, (bool, int, float, str)) and key not in _NUMBERING
            )
        )
        shapes = tuple(
            (key, tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
            for key, parameter in module.named_parameters(recurse=False)
        )
        parts.append((name, type(module), plain, shapes))
    return tuple(parts)
