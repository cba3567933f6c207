"""Backward passes in two halves: a stage's input gradient, which the previous stage waits for, then its weight gradients.

The linear layers of the decoder layers, which have nearly all weights, are split; the gradients of all other weights,
including the head's, come with the first half: the head's would wait beside the gradient of its logits, the largest tensor
of a step. Between the halves a stage keeps the inputs of its linear layers and the
gradients of their outputs, where a whole backward pass keeps those of one layer.

T: tokens (batch × sequence), I: input features, O: output features.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from toolkit.pipeline_parallel.grads import Fp32GradAccumulator
from toolkit.pipeline_parallel.part import inner_model, stage_info
from toolkit.tensor_parallel.deferred_grads import DeferredWeightGrad, WeightGradStore
from toolkit.tensor_parallel.linear import ShardedLinear, is_linear
from toolkit.tensor_parallel.ops import weight_gradient_in_time


def split_backward(model: Any) -> WeightGradStore:
    """Make the linear layers of a stage's decoder layers able to defer their weight gradients.

    Layers that are frozen, and those whose gradients a hook sums over ranks, are left whole.

    Args:
        model: Model after `split_model`, or the engine around it, with `requires_grad` set as in training.

    Returns:
        The store that defers the gradients; outside its `defer`, backward passes are whole.

    Raises:
        ValueError: If the model is not split for a pipeline.
    """
    info = stage_info(model)
    if info is None:
        raise ValueError("the model is not split for a pipeline")
    return defer_weight_gradients([inner_model(model).get_submodule(info.layers)])


def defer_weight_gradients(modules: Iterable[nn.Module]) -> WeightGradStore:
    """Make the linear layers inside some modules able to defer their weight gradients, as `split_backward` does."""
    gradients = WeightGradStore()
    for module in (inner for outer in modules for inner in outer.modules()):
        if not _is_trained_alone(module):
            continue
        if isinstance(module, ShardedLinear):
            module.weight_gradients = gradients
        elif is_linear(module):
            module.forward = partial(_forward, module, gradients)
    return gradients


@torch.no_grad()
def run_weight_backward(waiting: deque[DeferredWeightGrad], sums: Fp32GradAccumulator | None) -> None:
    """Compute the deferred weight gradients and add them to the gradients of the parameters, as a backward pass would.

    Args:
        waiting: Deferred gradients that `defer` collected; it is empty afterwards, and tensors are freed once used.
        sums: Accumulator in fp32; None to accumulate in the parameters' own gradients.
    """
    while waiting:
        _add(waiting.popleft(), sums)


def _add(delayed: DeferredWeightGrad, sums: Fp32GradAccumulator | None) -> None:
    for parameter, gradient in zip(delayed.parameters, delayed.compute(), strict=True):
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad.add_(gradient)
        if sums is not None:
            sums.add(parameter)


def _is_trained_alone(module: nn.Module) -> bool:
    own = list(module.parameters(recurse=False))
    return bool(own) and all(weight.requires_grad and not weight._backward_hooks for weight in own)


def _forward(module: nn.Module, gradients: WeightGradStore, x: torch.Tensor) -> torch.Tensor:
    weight, bias = module._parameters["weight"], module._parameters["bias"]
    # Flattened outside: models could not write in place to a view that the function itself returned.
    y_TO = _Linear.apply(x.flatten(0, -2), weight, bias, isinstance(module, Conv1D), gradients)  # type: ignore[no-untyped-call]
    return y_TO.unflatten(0, x.shape[:-1])  # type: ignore[no-any-return]


class _Linear(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TI: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        transposed: bool,
        gradients: WeightGradStore,
    ) -> torch.Tensor:
        ctx.save_for_backward(x_TI, weight)
        ctx.parameter, ctx.transposed, ctx.gradients = weight, transposed, gradients
        return functional.linear(x_TI, weight.t() if transposed else weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x_TI, weight = ctx.saved_tensors
        grad_TO = grads[0]
        needs_x, _, needs_bias, *_ = ctx.needs_input_grad
        grad_x = None
        if needs_x:
            grad_x = grad_TO @ (weight.t() if ctx.transposed else weight)
        grad_weight = weight_gradient_in_time(ctx, x_TI, grad_TO)
        return grad_x, grad_weight, grad_TO.sum(0) if needs_bias else None, None, None
