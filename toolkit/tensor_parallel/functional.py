"""The arithmetic of column- and row-parallel linear layers, forward and backward, with collectives beside products.

T: tokens (batch × sequence), I: input features, O: output features, of this rank.

Source:
    arXiv 1909.08053, section 3; arXiv 2205.05198, section 4.3 on what runs beside what.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from toolkit.groups.collectives import Pending, start_all_reduce


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnSpec:
    """What a column's gradient depends on besides its tensors.

    Args:
        transposed: Whether its weight is (in, out).
        replicated: Ranges of its output features that other ranks hold too.
        replica_group: Those ranks.
    """

    transposed: bool
    replicated: tuple[range, ...]
    replica_group: dist.ProcessGroup | None


def column_linears(
    x: torch.Tensor,
    columns: tuple[ColumnSpec, ...],
    parameters: Sequence[torch.Tensor | None],
    *,
    tp_group: dist.ProcessGroup,
) -> tuple[torch.Tensor, ...]:
    """Gives the outputs of several columns of one input.

    Args:
        x: Whole on each rank. Shape (…, in).
        columns: In the order of the outputs.
        parameters: Weight, bias, weight, bias, …; None for no bias.
        tp_group: Ranks that hold the other output features.

    Collectives:
        forward: none; backward: all-reduce of the input's gradient, while the weights' are computed, and of those of
        replicated features.
    """
    return _ColumnLinears.apply(x, columns, tp_group, *parameters)  # type: ignore[no-any-return, no-untyped-call]


def row_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    transposed: bool,
    tp_group: dist.ProcessGroup,
) -> torch.Tensor:
    """Gives the whole output of a row from this rank's part of its input.

    Args:
        x: Shape (…, in / tp).
        weight: Shape (out, in / tp), or (in / tp, out) where transposed.
        bias: Whole on each rank, added once. Shape (out).
        transposed: Whether the weight is (in, out).
        tp_group: Ranks that hold the other input features.

    Collectives:
        forward: all-reduce of the output; backward: none.
    """
    return _RowLinear.apply(x, weight, bias, transposed, tp_group)  # type: ignore[no-any-return, no-untyped-call]


class _ColumnLinears(Function):
    """Several columns of one input. Parameters come as weight, bias, weight, bias, …"""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, columns: tuple[ColumnSpec, ...], group: dist.ProcessGroup, *parameters: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        weights, biases = parameters[::2], parameters[1::2]
        ctx.save_for_backward(x, *weights)
        ctx.columns, ctx.group = columns, group
        ctx.set_materialize_grads(False)
        return tuple(
            functional.linear(x, weight.t() if column.transposed else weight, bias)
            for column, weight, bias in zip(columns, weights, biases, strict=True)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        x, *weights = ctx.saved_tensors
        read = [index for index, grad in enumerate(grads) if grad is not None]
        grads_TO = {index: grad.flatten(0, -2) for index, grad in enumerate(grads) if grad is not None}
        grad_x: Pending | None = None
        if ctx.needs_input_grad[0]:
            grad_x = start_all_reduce(_input_gradient(ctx.columns, weights, grads_TO), group=ctx.group)
        x_TI = x.flatten(0, -2)
        grad_parameters: list[torch.Tensor | None] = [None] * (2 * len(weights))
        sums: list[tuple[torch.Tensor, Pending]] = []
        for index in read:
            column, grad_TO = ctx.columns[index], grads_TO[index]
            if ctx.needs_input_grad[3 + 2 * index]:
                grad_weight = _weight_gradient(x_TI, grad_TO, transposed=column.transposed)
                sums += _start_replica_sums(grad_weight, column, dim=1 if column.transposed else 0)
                grad_parameters[2 * index] = grad_weight
            if ctx.needs_input_grad[4 + 2 * index]:
                grad_bias = grad_TO.sum(0)
                sums += _start_replica_sums(grad_bias, column, dim=0)
                grad_parameters[2 * index + 1] = grad_bias
        for target, pending in sums:
            target.copy_(pending.wait())  # nothing to do where the sum was made in place
        return None if grad_x is None else grad_x.wait().view_as(x), None, None, *grad_parameters


class _RowLinear(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        transposed: bool,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.transposed = transposed
        partial = functional.linear(x, weight.t() if transposed else weight)
        y = start_all_reduce(partial, group=group).wait()
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad_TO = grads[0].flatten(0, -2)
        grad_x = grad_weight = None
        if needs_x:
            grad_x = (grad_TO @ (weight.t() if ctx.transposed else weight)).view_as(x)
        if needs_weight:
            grad_weight = _weight_gradient(x.flatten(0, -2), grad_TO, transposed=ctx.transposed)
        return grad_x, grad_weight, grad_TO.sum(0) if needs_bias else None, None, None


def _input_gradient(
    columns: Sequence[ColumnSpec], weights: Sequence[torch.Tensor], grads_TO: dict[int, torch.Tensor]
) -> torch.Tensor:
    """Sums what the columns ask of their input, in one buffer. Shape (T, I)."""
    total_TI: torch.Tensor | None = None
    for index, grad_TO in grads_TO.items():
        weight_OI = weights[index].t() if columns[index].transposed else weights[index]
        total_TI = grad_TO @ weight_OI if total_TI is None else total_TI.addmm_(grad_TO, weight_OI)
    assert total_TI is not None, "autograd calls no function whose outputs have no gradient"
    return total_TI


def _weight_gradient(x_TI: torch.Tensor, grad_TO: torch.Tensor, *, transposed: bool) -> torch.Tensor:
    return x_TI.t() @ grad_TO if transposed else grad_TO.t() @ x_TI


def _start_replica_sums(grad: torch.Tensor, column: ColumnSpec, *, dim: int) -> Iterator[tuple[torch.Tensor, Pending]]:
    """Starts to sum the gradients of heads that other ranks hold too: each has seen its own queries alone."""
    for own in column.replicated:
        assert column.replica_group is not None, "a layout with replicated heads comes with their group"
        target = grad.narrow(dim, own.start, len(own))
        yield target, start_all_reduce(target.contiguous(), group=column.replica_group)
