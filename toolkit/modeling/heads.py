"""The modules of a model that are not its base model: the head of a task."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

# A layer by its number, as in `bert.encoder.layer.11.`.
_NUMBERED = re.compile(r"\.\d+\.")


def head_modules(model: Any) -> tuple[str, ...]:
    """Return the names of a `PreTrainedModel`'s modules with weights beside its base model, such as `score` or `classifier`."""
    prefix = getattr(model, "base_model_prefix", "")
    if not prefix or not hasattr(model, prefix):
        return ()
    return tuple(name for name, child in model.named_children() if name != prefix and _has_weights(child))


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def poolers(model: Any) -> tuple[str, ...]:
    """Return the names of poolers in a model's base, which other tasks' models may lack."""
    return tuple(name for name, _ in model.named_modules() if name.endswith(".pooler"))


def may_be_new(key: str, heads: tuple[str, ...]) -> bool:
    """Return whether a classifier's weight may be absent from pretrained ones: of its head, or of a pooler, which not all tasks have.

    Source:
        transformers modeling_utils.py from_pretrained, which draws whatever is missing.
    """
    return key.startswith(tuple(f"{name}." for name in heads)) or ".pooler." in key


def may_be_left(key: str, model: Any) -> bool:
    """Return whether a classifier may leave a pretrained weight unread: of another task's head, or of a pooler, which not all tasks have.

    A head is what stands outside of the base model and its layers. Its names are no closed list: files of DeBERTa-v3 have a
    `mask_predictions` that no class of transformers has. Keys may lack the base model's prefix, as those of a base model saved alone do.

    Args:
        key: Key of the checkpoint that no tensor of the model is read from.
        model: The `PreTrainedModel`.
    """
    first, *rest = parts = key.split(".")
    base = model.base_model
    in_base = first == model.base_model_prefix or (bool(rest) and first in dict(base.named_children()))
    in_base = in_base or first in dict(base.named_parameters(recurse=False))
    return "pooler" in parts or not (in_base or _NUMBERED.search(key))
