"""Context parallelism as a function of a model: its decoder layers compute a slice of each row, its attention the whole.

Each rank is given whole rows, and the model makes masks and positions of them as it always does; the first decoder layer keeps the
rank's slice of the embeddings. What follows the layers, the head and the loss too, sees that slice alone.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map
from transformers import PreTrainedConfig

from toolkit.context_parallel.attention import share_attention
from toolkit.context_parallel.slices import SequenceSlice
from toolkit.introspect import decoder_layers

_HIDDEN, _ROTATIONS = "hidden_states", "position_embeddings"


def apply_context_parallel(model: nn.Module, *, group: dist.ProcessGroup) -> None:
    """Make a model compute a slice of each row that it is given; modified in place.

    Its outputs are those of the slice. Gradients are parts, to be summed over the group.

    Args:
        model: Hugging Face model, of an architecture that `prove_context` accepts, with or without adapters.
        group: Ranks that share rows.
    """
    own, replaced = SequenceSlice.of(group), dict[int, PreTrainedConfig]()
    for place, layer in enumerate(decoder_layers(model)):
        layer.register_forward_pre_hook(_slicing(layer, own, is_first=place == 0), with_kwargs=True)
        share_attention(layer, group=group, replaced=replaced)


def _slicing(layer: nn.Module, own: SequenceSlice, *, is_first: bool) -> Any:
    """Return the hook that reduces a layer's inputs: hidden states of the first, rotations of the positions of all."""
    names = tuple(inspect.signature(layer.forward).parameters)

    def of_input(name: str, value: Any) -> Any:
        if name == _HIDDEN and is_first:
            return own.take(value, dim=1).clone()  # a view would keep the whole
        if name == _ROTATIONS:
            return tree_map(lambda x: own.take(x, dim=-2) if isinstance(x, torch.Tensor) else x, value)
        return value

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        positional = tuple(of_input(name, value) for name, value in zip(names, args, strict=False))
        return positional, {name: of_input(name, value) for name, value in kwargs.items()}

    return hook
