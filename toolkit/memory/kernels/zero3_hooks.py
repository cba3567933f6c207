"""Marks where DeepSpeed's module hooks of ZeRO-3 fire, through autograd functions at the same places.

Source:
    deepspeed runtime/zero/parameter_offload.py _register_deepspeed_module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

# Notes the hook of a module: its path, and whether it gathers (else it lets go).
Note = Callable[[str, bool], None]


def hook_modules(model: nn.Module, note: Note) -> list[Any]:
    """Marks the hooks of each module that holds parameters, and of leaves; gives the hooks' handles."""
    leaves = tuple(find_leaves(model))
    inside = tuple(f"{leaf}." for leaf in leaves)
    handles = []
    for name, module in model.named_modules():
        if name.startswith(inside):
            continue
        if name in leaves or next(module.parameters(recurse=False), None) is not None:
            handles += _hook(module, name, note)
    return handles


def find_leaves(model: nn.Module) -> Iterator[str]:
    """Yield the modules whose parameters, those of their children too, are gathered as one: no hook fires inside them.

    Source:
        deepspeed utils/z3_leaf_module.py set_z3_leaf_modules.
    """
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if getattr(module, "_z3_leaf", False) and not name.startswith(inside):
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
    """Applies a function to the tensors of a value that require gradients."""
    if isinstance(value, torch.Tensor):
        return function(value) if value.requires_grad else value
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(_through(item, function) for item in value)
    if isinstance(value, list):
        return [_through(item, function) for item in value]
    return value
