"""Errors of models that cannot be traced: the module at fault, and the fix."""

from __future__ import annotations

import traceback

import transformers
from torch import nn

from toolkit.errors import PlanError, SpecError, first_line

# torch/_subclasses/fake_tensor.py: raised by fake tensors where code reads the values of a tensor.
_DATA_DEPENDENT = ("DataDependentOutputException", "DynamicOutputShapeException", "GuardOnDataDependentSymNode")


def trace_failed(
    error: BaseException, model: nn.Module | None, *, backward: bool = False, of_user: bool = False
) -> PlanError:
    """Return the error for an exception that was raised while a model ran on fake tensors.

    Args:
        error: Exception as raised.
        model: Model that ran; None if it could not even be built.
        backward: Whether the backward pass had begun.
        of_user: Whether the module and its loss are the user's, not built from a job.
    """
    module = "" if model is None else _deepest_module(error, model)
    outside = "while it was built" if model is None else "in its loss" if of_user else "while its inputs were made"
    place = f"in {module}" if module else "in its backward pass" if backward else outside
    kind, reason = type(error).__name__, first_line(error)
    if of_user:
        fix = "Run it on such a batch to see whether it fails there too: example_batch is a mapping of keyword arguments, or a list of positional ones"
        if kind == "TypeError" and "of tensors of the types" in reason:
            fix = "Give example_batch the type of the weights (bf16 by default), cast it in the model, or name another precision"
        if kind in _DATA_DEPENDENT:
            fix = "Leave out what reads the values of tensors, such as .item(), `if` on a tensor, and indices by condition"
    elif kind in _DATA_DEPENDENT:
        fix = "Its sizes depend on the values of tensors: choose another train.attention or another architecture"
    else:
        fix = "Choose another train.attention, correct the model's config.json, or update transformers"
    return PlanError.of(
        code="TRACE_FAILED",
        key="model",
        message=f"the model cannot be traced, {place}: {kind if reason == kind else f'{kind}: {reason}'}",
        fix=fix,
        source="torch/_subclasses/fake_tensor.py" if kind in _DATA_DEPENDENT else "",
    )


def _deepest_module(error: BaseException, model: nn.Module) -> str:
    """Return the path and class of the innermost module whose forward pass was running."""
    names = {id(module): name for name, module in model.named_modules()}
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and id(module) in names:
            name = names[id(module)]
            return f"{name} ({type(module).__name__})" if name else type(module).__name__
    return ""


def unknown_architecture(error: Exception, name: str, *, trust_remote_code: bool) -> SpecError:
    """Return the error of a configuration for which transformers has no model."""
    reason = error.problems[0].message if isinstance(error, SpecError) else first_line(error)
    return SpecError.of(
        code="MODEL_CLASS",
        key="model",
        message=f"transformers {transformers.__version__} cannot build {name}: {reason.rstrip('.')}",
        fix="Update transformers, or choose a decoder model that it supports"
        if trust_remote_code
        else "Set model.trust_remote_code to true if the repository has its own code and you trust it, update "
        "transformers, or choose a decoder model that it supports",
        source="transformers models/auto/configuration_auto.py",
    )
