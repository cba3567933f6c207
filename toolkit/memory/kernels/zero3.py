"""A model as ZeRO-3 runs it: marks where DeepSpeed's module hooks run, and linear modules that keep their input.

The marks are made by autograd functions at the same places. Linear modules keep their input even where their weight is frozen.

Source:
    deepspeed runtime/zero/parameter_offload.py _register_deepspeed_module; runtime/zero/linear.py
    LinearFunctionForZeroStage3, by which zero.Init and the engine replace `torch.nn.functional.linear` unless
    `memory_efficient_linear` is false.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from toolkit.distributed.deepspeed_private import is_leaf
from toolkit.memory.kernels.compiled import is_compiled

# Records a module's hook: its path, and whether it gathers (otherwise it releases).
Note = Callable[[str, bool], None]


def hook_modules(model: nn.Module, note: Note) -> list[Any]:
    """Mark the hooks of each module that owns parameters, and of leaf modules, and return the handles.

    No hook runs inside a compiled layer. ZeRO-3 has none; FSDP2 gathers whole layers, by hooks of the layer itself.
    """
    compiled = (name for name, module in model.named_modules() if is_compiled(module))
    leaves = (*find_leaves(model), *compiled)
    inside = tuple(f"{leaf}." for leaf in leaves)
    handles = []
    for name, module in model.named_modules():
        if name.startswith(inside):
            continue
        if name in leaves or next(module.parameters(recurse=False), None) is not None:
            handles += _hook(module, name, note)
    return handles


def find_leaves(model: nn.Module) -> Iterator[str]:
    """Yield the leaf modules, whose parameters are gathered together with those of their children: no hook runs inside them.

    Source:
        deepspeed utils/z3_leaf_module.py set_z3_leaf_modules.
    """
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if is_leaf(module) and not name.startswith(inside):
            inside = (*inside, f"{name}.")
            yield name


def _hook(module: nn.Module, name: str, note: Note) -> list[Any]:
    pending = [0]

    def before(_: nn.Module, args: Any) -> Any:
        note(name, True)
        pending[0] = 0
        return _through(args, lambda tensor: _after_backward(tensor, pending, lambda: note(name, False)))

    def after(_: nn.Module, args: Any, output: Any) -> Any:
        note(name, False)
        return _through(output, lambda tensor: _BeforeBackward.apply(tensor, lambda: note(name, True)))  # type: ignore[no-untyped-call]

    return [module.register_forward_pre_hook(before), module.register_forward_hook(after)]


class _BeforeBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, notify: Callable[[], None]) -> torch.Tensor:
        ctx.notify = notify
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.notify()
        return gradients[0], None


class _AfterBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, pending: list[int], notify: Callable[[], None]) -> torch.Tensor:
        ctx.pending, ctx.notify = pending, notify
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.pending[0] -= 1
        if ctx.pending[0] == 0:
            ctx.notify()
        return gradients[0], None, None


def _after_backward(tensor: torch.Tensor, pending: list[int], notify: Callable[[], None]) -> Any:
    if not tensor.requires_grad:
        return tensor
    pending[0] += 1
    return _AfterBackward.apply(tensor, pending, notify)  # type: ignore[no-untyped-call]


def _through(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Apply a function to the tensors of a value that require gradients."""
    if isinstance(value, torch.Tensor):
        return function(value) if value.requires_grad else value
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(_through(item, function) for item in value)
    if isinstance(value, list):
        return [_through(item, function) for item in value]
    return value


class _KeepsInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(values, weight)
        product = values.matmul(weight.t())
        return product if bias is None else product.add_(bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        values, weight = ctx.saved_tensors
        of_values, of_weight, of_bias = ctx.needs_input_grad
        rows = gradient.reshape(-1, gradient.shape[-1])
        return (
            gradient.matmul(weight) if of_values else None,
            rows.t().matmul(values.reshape(-1, values.shape[-1])) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )


@contextlib.contextmanager
def linear_modules(*, zero3: bool) -> Iterator[None]:
    """Run linear modules in a block as ZeRO-3 does, or as torch does.

    A stage-3 engine of this process, past or present, has replaced torch's function by its own, so both are set.
    """
    before = functional.linear

    def keeping(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return _KeepsInput.apply(input, weight, bias)  # type: ignore[no-any-return,no-untyped-call]

    functional.linear = keeping if zero3 else torch._C._nn.linear
    try:
        yield
    finally:
        functional.linear = before
