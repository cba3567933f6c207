"""Gradient checkpointing of all layers or a share of them, and offloading of their inputs to host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from toolkit.errors import PlanError
from toolkit.introspect import decoder_layers


def apply_gradient_checkpointing(model: nn.Module, *, fraction: float, offload_inputs: bool) -> int:
    """Make a share of the decoder layers recompute their activations in the backward pass, and return how many do.

    Args and errors are those of `layers_to_checkpoint` and `checkpoint_layers`.
    """
    layers = layers_to_checkpoint(model, fraction=fraction)
    checkpoint_layers(layers, offload_inputs=offload_inputs)
    return len(layers)


def layers_to_checkpoint(model: nn.Module, *, fraction: float) -> list[nn.Module]:
    """Return the decoder layers that recompute their activations, spread evenly over the depth.

    Args:
        model: Hugging Face model.
        fraction: Share of the layers, 0 to 1.

    Raises:
        PlanError: CHECKPOINTING_LAYERS if the model has no layers that can recompute.

    Source:
        arXiv 1604.06174; transformers modeling_layers.py GradientCheckpointingLayer.
    """
    if fraction == 0:
        return []
    layers = decoder_layers(model)
    if not layers:
        raise PlanError.of(
            code="CHECKPOINTING_LAYERS",
            key="train.gradient_checkpointing",
            message=f"gradient_checkpointing={fraction:g}: {type(model).__name__} has no GradientCheckpointingLayer",
            fix="Set train.gradient_checkpointing to false",
            source="transformers modeling_layers.py",
        )
    return [layers[index] for index in sorted(evenly_spaced(len(layers), fraction))]


def checkpoint_layers(layers: Iterable[Any], *, offload_inputs: bool) -> None:
    """Make decoder layers recompute their activations in the backward pass.

    Args:
        layers: Layers that `layers_to_checkpoint` returned.
        offload_inputs: Whether to keep the input of each layer in pinned host memory until its backward pass.
    """
    function = _checkpoint_with_input_on_host if offload_inputs else _checkpoint
    for layer in layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = function


def evenly_spaced(count: int, fraction: float) -> frozenset[int]:
    """Return the indices of a share of `count` layers, spread evenly, at least one.

    >>> sorted(evenly_spaced(8, 0.5))
    [0, 2, 4, 6]
    """
    chosen = max(1, round(fraction * count))
    return frozenset(index * count // chosen for index in range(chosen))


def _checkpoint(function: Callable[..., Any], *inputs: Any) -> Any:
    return checkpoint(function, *inputs, use_reentrant=False)


def _checkpoint_with_input_on_host(function: Callable[..., Any], hidden_BSD: torch.Tensor, *inputs: Any) -> Any:
    """Run `function` with checkpointing, recomputing it from a host copy of its first input.

    The gradient flows through the graph of the first forward pass; the recomputation only restores that graph's saved
    tensors (torch.utils.checkpoint, use_reentrant=False), so a detached copy is sufficient.
    """
    held = _HostCopy(hidden_BSD)

    def run(_: torch.Tensor, *rest: Any) -> Any:
        return function(held.take(), *rest)

    # An empty tensor tells checkpoint() which device's random state to save, without keeping the input alive.
    output = checkpoint(run, hidden_BSD.new_empty(0), *inputs, use_reentrant=False)
    held.move_to_host()
    return output


class _HostCopy:
    """A tensor that stays on its device until `move_to_host`, and is copied back at each later `take`."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._device = tensor.device
        self._requires_grad = tensor.requires_grad
        self._on_host = False

    def take(self) -> torch.Tensor:
        if not self._on_host:
            return self._tensor
        # copy=True also on CPU: the recomputation must not alias the saved input.
        tensor = self._tensor.to(self._device, non_blocking=True, copy=True)
        return tensor.requires_grad_(self._requires_grad)

    def move_to_host(self) -> None:
        source = self._tensor.detach()
        host = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
        host.copy_(source, non_blocking=True)
        self._tensor, self._on_host = host, True
