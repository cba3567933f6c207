"""Gradient checkpointing of all layers or a share of them, and offloading of their inputs to host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from toolkit.config.job import Kept
from toolkit.errors import PlanError
from toolkit.introspect import decoder_layers

# Operators by whose results a layer that recomputes is told what to keep. The estimate's attention is one of its own.
_OPERATORS: dict[Kept, frozenset[str]] = {
    "linear": frozenset({"aten::mm", "aten::addmm"}),
    "attention": frozenset(
        {
            "aten::_scaled_dot_product_flash_attention",
            "aten::_scaled_dot_product_flash_attention_for_cpu",
            "aten::_scaled_dot_product_efficient_attention",
            "aten::_scaled_dot_product_cudnn_attention",
            "toolkit_trace::fused_attention",
        }
    ),
}


def apply_gradient_checkpointing(
    model: nn.Module, *, fraction: float, every: int = 1, keep: Sequence[Kept] = (), offload_inputs: bool
) -> int:
    """Make a share of the decoder layers recompute their activations in the backward pass, and return how many do.

    Args and errors are those of `layers_to_checkpoint` and `checkpoint_layers`.
    """
    layers = layers_to_checkpoint(model, fraction=fraction, every=every)
    checkpoint_layers(layers, keep=keep, offload_inputs=offload_inputs)
    return len(layers)


def layers_to_checkpoint(model: nn.Module, *, fraction: float, every: int = 1) -> list[nn.Module]:
    """Return the decoder layers that recompute their activations, spread evenly over the depth.

    Args:
        model: Hugging Face model.
        fraction: Share of the layers, 0 to 1.
        every: Every how many layers, if above 1, in place of the share.

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
    return [layers[index] for index in sorted(recomputing(len(layers), fraction, every))]


def checkpoint_layers(layers: Iterable[Any], *, keep: Sequence[Kept] = (), offload_inputs: bool) -> None:
    """Make decoder layers recompute their activations in the backward pass.

    Args:
        layers: Layers that `layers_to_checkpoint` returned.
        keep: Results that they keep.
        offload_inputs: Whether to keep the input of each layer in pinned host memory until its backward pass.
    """
    run = _checkpoint_with_input_on_host if offload_inputs else _checkpoint
    function = partial(run, _contexts(keep))
    for layer in layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = function


def recomputing(count: int, fraction: float, every: int = 1) -> frozenset[int]:
    """Return the indices of the layers that recompute, among `count`.

    >>> sorted(recomputing(8, 1 / 3, every=3)), sorted(recomputing(4, 0.5)), sorted(recomputing(4, 0.0))
    ([0, 3, 6], [0, 2], [])
    """
    if fraction == 0:
        return frozenset()
    return frozenset(range(0, count, every)) if every > 1 else evenly_spaced(count, fraction)


def evenly_spaced(count: int, fraction: float) -> frozenset[int]:
    """Return the indices of a share of `count` layers, spread evenly, at least one.

    >>> sorted(evenly_spaced(8, 0.5))
    [0, 2, 4, 6]
    """
    chosen = max(1, round(fraction * count))
    return frozenset(index * count // chosen for index in range(chosen))


def _contexts(keep: Sequence[Kept]) -> dict[str, Any]:
    """Return the options of `checkpoint` with which results are kept.

    Source:
        torch utils/checkpoint.py create_selective_checkpoint_contexts.
    """
    if not keep:
        return {}
    names = frozenset().union(*(_OPERATORS[kind] for kind in keep))

    def policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_kept = isinstance(operator, OpOverload) and operator._schema.name in names
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return {"context_fn": partial(create_selective_checkpoint_contexts, policy)}


def _checkpoint(options: Mapping[str, Any], function: Callable[..., Any], *inputs: Any) -> Any:
    return checkpoint(function, *inputs, use_reentrant=False, **options)


def _checkpoint_with_input_on_host(
    options: Mapping[str, Any], function: Callable[..., Any], hidden_BSD: torch.Tensor, *inputs: Any
) -> Any:
    """Run `function` with checkpointing, recomputing it from a host copy of its first input.

    The gradient flows through the graph of the first forward pass; the recomputation only restores that graph's saved
    tensors (torch.utils.checkpoint, use_reentrant=False), so a detached copy is sufficient.
    """
    held = _HostCopy(hidden_BSD)

    def run(_: torch.Tensor, *rest: Any) -> Any:
        return function(held.take(), *rest)

    # An empty tensor tells checkpoint() which device's random state to save, without keeping the input alive.
    output = checkpoint(run, hidden_BSD.new_empty(0), *inputs, use_reentrant=False, **options)
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
