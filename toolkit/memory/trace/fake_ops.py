"""Results of operations that read the values of tensors, which fake tensors do not have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_leaves

from toolkit.memory.kernels.dispatch import ALL_ONES

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


# Elements up to which values are computed: above, only masks of attention are so large, and nothing reads their values.
_MOST_ELEMENTS = 2**26
_FILLED = (aten.zeros.default, aten.ones.default, aten.full.default)
_COUNTED = (aten.arange.default, aten.arange.start, aten.arange.start_step)
_INDEXED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)


def known_values(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Compute what depends on integers alone, such as places of images and sizes of their grids, which models read on the host.

    Of counts that are not known, none is the one that is asked for: no image of a batch is padding, all of whose pixels are 0.

    Source:
        transformers vision_utils.py; models/qwen2_5_vl/modeling_qwen2_5_vl.py get_rope_index;
        models/idefics3/modeling_idefics3.py get_image_features.
    """
    if function in _INDEXED and (found := _indexed(function, args, kwargs)) is not NotImplemented:
        return found
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if any(isinstance(tensor, FakeTensor) for tensor in tensors):
        if function is aten.ne.Scalar and args[0].ndim == 1 and args[0].dtype == torch.int64:
            with unset_fake_temporarily():
                return torch.ones(args[0].shape, dtype=torch.bool)
        return NotImplemented
    if not tensors and not _makes_integers(function, args, kwargs):
        return NotImplemented
    if _elements(function, args, tensors) > _MOST_ELEMENTS:
        return NotImplemented
    with unset_fake_temporarily():
        return function(*args, **kwargs)


def _indexed(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Take or put elements by masks: by where they are true, if that is known."""
    base, places, *rest = args
    masks = [place for place in places if place is not None and place.dtype == torch.bool]
    if not masks or any(isinstance(mask, FakeTensor) for mask in masks) or not isinstance(base, FakeTensor):
        return NotImplemented
    numbers: list[Any] = []
    for place in places:
        is_mask = place is not None and place.dtype == torch.bool
        with unset_fake_temporarily():
            numbers += place.nonzero(as_tuple=True) if is_mask else [place]
    return function(base, numbers, *rest, **kwargs)


def _makes_integers(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    dtype = kwargs.get("dtype")
    if function not in (*_FILLED, *_COUNTED):
        return False
    if dtype is not None:
        return not dtype.is_floating_point
    return function in _COUNTED and all(isinstance(each, int) for each in args)


def _elements(function: Any, args: Sequence[Any], tensors: Sequence[torch.Tensor]) -> int:
    """Return about how many elements an operation reads or returns."""
    if not tensors:
        return torch.Size(args[0]).numel() if function in _FILLED else 0
    try:
        return torch.Size(torch.broadcast_shapes(*(tensor.shape for tensor in tensors))).numel()  # type: ignore[no-untyped-call]
    except RuntimeError:  # such as of a concatenation
        return max(tensor.numel() for tensor in tensors)


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


def norm_statistics(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return mean and deviation of rows in fp32, as a card keeps them for the backward pass; on a CPU they have the input's type.

    Source:
        aten/src/ATen/native/cuda/layer_norm_kernel.cu layer_norm_cuda.
    """
    if function is not aten.native_layer_norm.default or args[0].dtype not in (torch.float16, torch.bfloat16):
        return NotImplemented
    out, mean, deviation = function(*args, **kwargs)
    return out, torch.empty_like(mean, dtype=torch.float32), torch.empty_like(deviation, dtype=torch.float32)


def marked_ones(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Mark a tensor that is made of ones, as masks are that models make themselves (kernels/dispatch.py)."""
    if function is not aten.ones.default:
        return NotImplemented
    made = function(*args, **kwargs)
    setattr(made, ALL_ONES, True)
    return made
