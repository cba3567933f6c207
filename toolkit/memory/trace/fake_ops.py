"""Results of operations that read the values of tensors, which fake tensors do not have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

aten = torch.ops.aten
collectives: Any = torch.ops._c10d_functional


class FakeOpRule(Protocol):
    """Return the result of an operation from its arguments; NotImplemented where the rule does not apply."""

    def __call__(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any: ...


def disable_layer_dropout(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run every layer where some may be dropped at random, and count over a known number of classes.

    Source:
        transformers models/opt/modeling_opt.py (layerdrop), models/mixtral/modeling_mixtral.py
        load_balancing_loss_func (5.17).
    """
    if function is aten.rand.default and not args[0]:
        return torch.tensor(1.0)
    if function is aten.bincount.default:
        given: list[Any] = [*args, None, None]
        values, weights, minlength = given[:3]
        classes = minlength or kwargs.get("minlength", 0)
        if classes:
            return values.new_empty(classes, dtype=torch.int64 if weights is None else torch.float64)
    return NotImplemented


def inplace_collectives(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the input of collectives that write to it, and of the wait for one, since the result shares its memory.

    For `wait_tensor`, fake tensors would allocate another one. On the host (but not on a card) ranks draw the seed of
    their own dropout.

    Source:
        torch csrc/distributed/c10d/Functional.cpp; toolkit tensor_parallel/rng.py.
    """
    if function in (collectives.wait_tensor.default, collectives.all_reduce_.default):
        return args[0]
    if function is aten.randint.generator and not args[1]:
        return torch.tensor(0)
    return NotImplemented


# Products whose operands a card takes in one type alone; fake tensors promote them, so that a trace would pass what fails in a run.
_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)


def same_types(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Refuse products of tensors of several types, as torch does on real ones.

    Raises:
        TypeError: The types differ.

    Source:
        aten/src/ATen/native/LinearAlgebra.cpp addmm: "expected ... to have the same dtype".
    """
    if function in _PRODUCTS:
        types = dict.fromkeys(str(arg.dtype).removeprefix("torch.") for arg in args if isinstance(arg, torch.Tensor))
        if len(types) > 1:
            name = str(function).split(".")[1]
            raise TypeError(f"{name} of tensors of the types {' and '.join(types)}, which torch multiplies only in one")
    return NotImplemented
