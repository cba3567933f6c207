"""Remembered results are those that fake tensors give, with the memory that they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from toolkit.memory.trace.fake_results import FakeResults

aten = torch.ops.aten

CALLS: dict[str, Callable[[torch.Tensor], tuple[Any, tuple[Any, ...], dict[str, Any]]]] = {
    "product": lambda x: (aten.mm.default, (x, aten.t.default(x)), {}),
    "sum with a number": lambda x: (aten.add.Tensor, (x, 1), {}),
    "sum with a truth": lambda x: (aten.add.Tensor, (x, True), {}),
    "cast": lambda x: (aten._to_copy.default, (x,), {"dtype": torch.bfloat16}),
    "transposed": lambda x: (aten.t.default, (x,), {}),
    "view": lambda x: (aten.view.default, (x, [2, 2, 8]), {}),
    "unsafe view": lambda x: (aten._unsafe_view.default, (x, [2, 2, 8]), {}),
    "slice": lambda x: (aten.slice.Tensor, (x, 1, 2, 6), {}),
    "parts": lambda x: (aten.split.Tensor, (x, 2), {}),
    "joined": lambda x: (aten.cat.default, ([x, x], 1), {}),
    "in place": lambda x: (aten.mul_.Tensor, (x, 2.0), {}),
    "two results": lambda x: (aten.topk.default, (x, 2), {}),
    "expanded": lambda x: (aten.expand.default, (aten.sum.dim_IntList(x, [1], True), [4, 5]), {}),
}


def described(result: Any, given: torch.Tensor) -> Any:
    if isinstance(result, list | tuple):
        return type(result), [described(each, given) for each in result]
    shares = result.untyped_storage()._cdata == given.untyped_storage()._cdata
    bytes_held = result.untyped_storage().nbytes()
    return (
        *(result.shape, result.stride(), result.storage_offset(), result.dtype, result.fake_device),
        *(shares, result is given, bytes_held),
    )


@pytest.mark.parametrize("call", CALLS)
def test_a_remembered_result_is_the_same(call: str) -> None:
    results = FakeResults()
    with FakeTensorMode(), torch.no_grad():
        for dtype in (torch.float32, torch.bfloat16, torch.float32, torch.bfloat16):
            given = torch.empty(4, 8, dtype=dtype)
            function, args, kwargs = CALLS[call](given)
            expected = described(function(*args, **kwargs), given)
            assert described(results.run(function, args, kwargs), given) == expected


def test_what_depends_on_values_is_not_remembered() -> None:
    results = FakeResults()
    with FakeTensorMode():
        for value in (2.0, 3.0):
            constant = torch.tensor(value)
            assert results.run(aten.mul.Tensor, (constant, 2), {}).item() == 2 * value


def test_numbers_that_are_equal_but_of_other_types_are_told_apart() -> None:
    results = FakeResults()
    with FakeTensorMode():
        whole = torch.ones(3, dtype=torch.int64)
        assert results.run(aten.add.Tensor, (whole, 1), {}).dtype is torch.int64
        assert results.run(aten.add.Tensor, (whole, 1.0), {}).dtype is torch.float32
        assert results.run(aten.add.Tensor, (whole, 1), {}).dtype is torch.int64
