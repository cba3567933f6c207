"""Linear modules as ZeRO-3 runs them, which keeps their input even where their weight is frozen.

Source: deepspeed runtime/zero/linear.py LinearFunctionForZeroStage3, which zero.Init and the engine put in the place of
`torch.nn.functional.linear` unless `memory_efficient_linear` is false.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional


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

    An engine of stage 3 that lives in this process, or has lived here, has left its own in torch's place, so both are set.
    """
    before = functional.linear

    def keeping(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return _KeepsInput.apply(input, weight, bias)  # type: ignore[no-any-return,no-untyped-call]

    functional.linear = keeping if zero3 else torch._C._nn.linear
    try:
        yield
    finally:
        functional.linear = before
