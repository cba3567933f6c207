"""Replicated parameters whose gradient on each rank is a partial sum: it is summed over ranks in each backward pass.

These are norms between columns and rows, which see only the heads of their rank, and with sequence parallelism all modules
that act on shards of the sequence.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from toolkit.distributed.collectives import all_reduce
from toolkit.tensor_parallel.plan import inside

# Attribute of a parameter that has its hook, and attribute of a module: process group by name of its own parameter.
_HOOKED, _GROUPS = "gradient_is_summed", "gradient_sums"


def sum_gradients(module: nn.Module, names: Iterable[str], *, group: dist.ProcessGroup) -> None:
    """Sum the gradients of a module's own parameters over a group, from now on.

    Moving a model off the meta device makes new parameters without the hooks of the old ones, so hooks are registered again
    when the module is called. A model that is compiled as a whole before its first call needs `register_gradient_sums`.

    Args:
        module: Owner of the parameters.
        names: Names of its own parameters, frozen ones included.
        group: Ranks whose gradients are summed.
    """
    groups = {name: group for name in names if module._parameters.get(name) is not None}
    if not groups:
        return
    setattr(module, _GROUPS, groups)
    _register(module)
    module.register_forward_pre_hook(_register_before)


def gradient_group(module: nn.Module) -> dist.ProcessGroup | None:
    """Return the ranks over which the gradient of a replicated module's weight is summed; None if it is whole on each."""
    groups: dict[str, dist.ProcessGroup] = getattr(module, _GROUPS, {})
    return groups.get("weight")


def register_gradient_sums(model: nn.Module) -> None:
    """Register the missing hooks of all parameters of a sharded model whose gradients are to be summed."""
    for module in model.modules():
        _register(module)


def carry_hooks(old: nn.Parameter, new: nn.Parameter) -> None:
    """Register the gradient hooks of a parameter on its replacement; a frozen one has no gradient to sum."""
    if not new.requires_grad:
        return
    for hook in (old._backward_hooks or {}).values():
        new.register_hook(hook)  # type: ignore[no-untyped-call]
    if hasattr(old, _HOOKED):
        setattr(new, _HOOKED, True)


def summed_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the replicated parameters of a sharded model whose gradients are summed over ranks, by name."""
    return {
        inside(name, own): module.get_parameter(own)
        for name, module in model.named_modules()
        for own in getattr(module, _GROUPS, {})
    }


def _register_before(module: nn.Module, args: Any) -> None:
    if not torch.compiler.is_compiling():
        _register(module)


def _register(module: nn.Module) -> None:
    for name, group in getattr(module, _GROUPS, {}).items():
        parameter = module._parameters[name]
        if parameter is not None and parameter.requires_grad and not hasattr(parameter, _HOOKED):
            parameter.register_hook(partial(all_reduce, group=group))  # type: ignore[no-untyped-call]
            setattr(parameter, _HOOKED, True)
