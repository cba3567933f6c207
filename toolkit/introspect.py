"""What a model of transformers is made of: its decoder layers, and weights that several modules share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer


def named_decoder_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers that transformers checkpoints one by one, with their names.

    Source:
        transformers modeling_layers.py GradientCheckpointingLayer.
    """
    return ((name, module) for name, module in model.named_modules() if isinstance(module, GradientCheckpointingLayer))


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of `named_decoder_layers`."""
    return [layer for _, layer in named_decoder_layers(model)]


def layer_lists(model: nn.Module) -> dict[str, nn.ModuleList]:
    """Return the lists of decoder layers alone, by name; without lists inside another one's layers."""
    found: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        if (
            not isinstance(module, nn.ModuleList)
            or not len(module)
            or name.startswith(tuple(f"{one}." for one in found))
        ):
            continue
        if all(isinstance(layer, GradientCheckpointingLayer) for layer in module):
            found[name] = module
    return found


def vision_tower(model: Any) -> tuple[str, nn.Module]:
    """Return the module that a model reads images with, and its name: the outermost one of the type of `vision_config`."""
    kind = type(model.config.vision_config)
    found = ((name, module) for name, module in model.named_modules() if type(getattr(module, "config", None)) is kind)
    return next(found)


def language_model(model: Any) -> tuple[str, nn.Module]:
    """Return the decoder of a model that reads images, and its name: the outermost one of the type of `text_config`."""
    kind = type(model.config.text_config)
    found = ((name, module) for name, module in model.named_modules() if type(getattr(module, "config", None)) is kind)
    return next(found)


def tied_groups(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several, in the order of the modules."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [group for group in names.values() if len(group) > 1]


def tied_keys(model: nn.Module) -> dict[str, str]:
    """Return the tied weights of the config: keys that `save_pretrained` drops, mapped to those that it keeps."""
    return dict(getattr(model, "all_tied_weights_keys", None) or {})
