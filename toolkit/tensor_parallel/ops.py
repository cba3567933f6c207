"""Forward and backward passes of column- and row-parallel linear layers, with collectives that overlap with products.

T: tokens (batch × sequence), I: input features, O: output features, of this rank.

Source:
    arXiv 1909.08053, section 3; arXiv 2205.05198, section 4.2.2 on sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from toolkit.distributed.collectives import Pending, start_all_gather, start_all_reduce, start_reduce_scatter
from toolkit.tensor_parallel.autograd import SEQUENCE_DIM
from toolkit.tensor_parallel.deferred_grads import DeferredWeightGrad, WeightGradStore


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnSpec:
    """What the gradient of a column depends on in addition to its tensors.

    Args:
        transposed: Whether its weight has shape (in, out).
        replicated: Ranges of its output features that other ranks have too.
        replica_group: Ranks that have these features.
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
    whole: torch.Tensor | None = None,
    reduces: bool = True,
    gradients: WeightGradStore | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return the outputs of several columns that read the same input.

    Args:
        x: Input, whole on each rank, shape (…, in); if `whole` is given, this rank's shard of it, shape (…, seq / tp, in),
            which is all that is kept for the backward pass.
        columns: Properties of the columns, in the order of the outputs.
        parameters: Weight, bias, weight, bias, …; None for no bias.
        tp_group: Ranks that share the output features.
        whole: Gathered shards of `x`, without a gradient of its own. Shape (…, seq, in).
        reduces: Whether the gradient of a whole `x` is summed here; False if the producer of `x` sums it.
        gradients: Store that defers the gradients of the weights; None if they are never deferred.

    Collectives:
        forward: none; backward: all-reduce of the input's gradient, while those of the weights are computed, and of those of
        replicated features. With `whole`: all-gather of `x` while the input's gradient is computed, and reduce-scatter
        of that gradient.
    """
    return _ColumnLinears.apply(x, whole, columns, tp_group, reduces, gradients, *parameters)  # type: ignore[no-any-return, no-untyped-call]


def row_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    transposed: bool,
    tp_group: dist.ProcessGroup,
    to_piece: bool = False,
    gradients: WeightGradStore | None = None,
) -> torch.Tensor:
    """Return the output of a row from this rank's part of its input.

    Args:
        x: This rank's input features. Shape (…, in / tp).
        weight: Shape (out, in / tp), or (in / tp, out) if transposed.
        bias: Bias, whole on each rank, added once. Shape (out).
        transposed: Whether the weight has shape (in, out).
        tp_group: Ranks that share the input features.
        to_piece: Whether to return only this rank's shard of the sequence, the dimension before the features.
        gradients: Store that defers the gradient of the weight; None if it is never deferred.

    Collectives:
        forward: all-reduce of the output; backward: none. With `to_piece`, forward: reduce-scatter; backward: all-gather of
        the output's gradient, so that the gradient of the bias is whole.
    """
    return _RowLinear.apply(x, weight, bias, transposed, tp_group, to_piece, gradients)  # type: ignore[no-any-return, no-untyped-call]


class _ColumnLinears(Function):
    """Several columns that read the same input. Parameters come as weight, bias, weight, bias, …"""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        whole: torch.Tensor | None,
        columns: tuple[ColumnSpec, ...],
        group: dist.ProcessGroup,
        reduces: bool,
        gradients: WeightGradStore | None,
        *parameters: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        weights, biases = parameters[::2], parameters[1::2]
        ctx.save_for_backward(x, *weights)
        ctx.columns, ctx.group, ctx.reduces, ctx.gradients = columns, group, reduces, gradients
        if gradients is not None:
            ctx.parameters = parameters
        ctx.whole_shape = None if whole is None else whole.shape
        ctx.set_materialize_grads(False)
        return tuple(
            functional.linear(x if whole is None else whole, weight.t() if column.transposed else weight, bias)
            for column, weight, bias in zip(columns, weights, biases, strict=True)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        x, *weights = ctx.saved_tensors
        read = [index for index, grad in enumerate(grads) if grad is not None]
        grads_TO = {index: grad.flatten(0, -2) for index, grad in enumerate(grads) if grad is not None}
        needs_x: bool = ctx.needs_input_grad[0]
        needs: tuple[bool, ...] = ctx.needs_input_grad[_FIRST_PARAMETER:]
        wanted = [place for index in read for place in (2 * index, 2 * index + 1) if needs[place]]
        waits = ctx.gradients is not None and ctx.gradients.wait
        is_piece = ctx.whole_shape is not None
        gathers = is_piece and any(place % 2 == 0 for place in wanted)
        # Overlaps with the product of the input's gradient.
        gathering = start_all_gather(x, dim=SEQUENCE_DIM, group=ctx.group) if gathers and not waits else None
        finish_grad_x = _start_input_gradient(ctx, weights, grads_TO) if needs_x else None
        found: list[torch.Tensor | None] = [None] * (2 * len(weights))
        if waits and wanted:
            x = x.detach()  # a deferred gradient must not keep the earlier graph alive
            compute = partial(_later, x, ctx.columns, grads_TO, wanted, ctx.group if gathers else None)
            parameters = tuple(ctx.parameters[place] for place in wanted)
            ctx.gradients.add(DeferredWeightGrad(parameters=parameters, compute=compute, input=x))
        else:
            whole = x if gathering is None else gathering.wait()
            for place, gradient in zip(wanted, _parameter_gradients(whole, ctx.columns, grads_TO, wanted), strict=True):
                found[place] = gradient
        grad_x = None if finish_grad_x is None else finish_grad_x().view_as(x)
        return grad_x, *[None] * (_FIRST_PARAMETER - 1), *found


# Position of the first weight among the arguments of `_ColumnLinears`.
_FIRST_PARAMETER = 6


class _RowLinear(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        transposed: bool,
        group: dist.ProcessGroup,
        to_piece: bool,
        gradients: WeightGradStore | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.transposed, ctx.group, ctx.to_piece, ctx.gradients = transposed, group, to_piece, gradients
        if gradients is not None:
            ctx.parameter = weight
        partial = functional.linear(x, weight.t() if transposed else weight)
        reducing = (
            start_reduce_scatter(partial, dim=SEQUENCE_DIM, group=group)
            if to_piece
            else start_all_reduce(partial, group=group)
        )
        y = reducing.wait()
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad = start_all_gather(grads[0], dim=SEQUENCE_DIM, group=ctx.group).wait() if ctx.to_piece else grads[0]
        grad_TO = grad.flatten(0, -2)
        grad_x = grad_weight = None
        if needs_x:
            grad_x = (grad_TO @ (weight.t() if ctx.transposed else weight)).view_as(x)
        if needs_weight:
            grad_weight = weight_gradient_in_time(ctx, x.flatten(0, -2), grad_TO)
        return grad_x, grad_weight, grad_TO.sum(0) if needs_bias else None, None, None, None, None


def _start_input_gradient(
    ctx: Any, weights: Sequence[torch.Tensor], grads_TO: dict[int, torch.Tensor]
) -> Callable[[], torch.Tensor]:
    """Start to sum the gradient of the columns' input over the ranks; return a function that waits for the sum."""
    partial_TI = _input_gradient(ctx.columns, weights, grads_TO)
    if ctx.whole_shape is not None:
        return start_reduce_scatter(partial_TI.view(ctx.whole_shape), dim=SEQUENCE_DIM, group=ctx.group).wait
    return start_all_reduce(partial_TI, group=ctx.group).wait if ctx.reduces else lambda: partial_TI


def _input_gradient(
    columns: Sequence[ColumnSpec], weights: Sequence[torch.Tensor], grads_TO: dict[int, torch.Tensor]
) -> torch.Tensor:
    """Return the sum of the columns' gradients of their input, in one buffer. Shape (T, I)."""
    total_TI: torch.Tensor | None = None
    for index, grad_TO in grads_TO.items():
        weight_OI = weights[index].t() if columns[index].transposed else weights[index]
        total_TI = grad_TO @ weight_OI if total_TI is None else total_TI.addmm_(grad_TO, weight_OI)
    assert total_TI is not None, "autograd calls no function whose outputs have no gradient"
    return total_TI


def _parameter_gradients(
    x: torch.Tensor, columns: Sequence[ColumnSpec], grads_TO: dict[int, torch.Tensor], wanted: Sequence[int]
) -> list[torch.Tensor]:
    """Return the gradients of the weights and biases of columns; those of replicated features are summed.

    Args:
        x: Whole input of the columns. Shape (…, in).
        columns: All columns that read it.
        grads_TO: Gradients of their outputs, by position among the columns.
        wanted: Positions of the wanted gradients in weight, bias, weight, bias, …
    """
    x_TI = x.flatten(0, -2)
    found: list[torch.Tensor] = []
    sums: list[tuple[torch.Tensor, Pending]] = []
    for place in wanted:
        index, is_bias = divmod(place, 2)
        column, grad_TO = columns[index], grads_TO[index]
        gradient = grad_TO.sum(0) if is_bias else weight_gradient(x_TI, grad_TO, transposed=column.transposed)
        sums.extend(_start_replica_sums(gradient, column, dim=1 if column.transposed and not is_bias else 0))
        found.append(gradient)
    for target, pending in sums:
        target.copy_(pending.wait())  # no-op if the sum was computed in place
    return found


def _later(
    x: torch.Tensor,
    columns: Sequence[ColumnSpec],
    grads_TO: dict[int, torch.Tensor],
    wanted: Sequence[int],
    group: dist.ProcessGroup | None,
) -> list[torch.Tensor]:
    """Return the deferred gradients, from the columns' input or, if a group is given, from this rank's shard of it."""
    whole = x if group is None else start_all_gather(x, dim=SEQUENCE_DIM, group=group).wait()
    return _parameter_gradients(whole, columns, grads_TO, wanted)


def weight_gradient(x_TI: torch.Tensor, grad_TO: torch.Tensor, *, transposed: bool) -> torch.Tensor:
    """Return the gradient of a linear layer's weight: shape (O, I), or (I, O) if transposed."""
    return x_TI.t() @ grad_TO if transposed else grad_TO.t() @ x_TI


def weight_gradient_in_time(ctx: Any, x_TI: torch.Tensor, grad_TO: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of the one weight of a function's `ctx`, or defer it and return None.

    Args:
        ctx: Context with `transposed`, `gradients` and, if that is not None, `parameter`: the weight as a parameter, since
            recomputed layers save copies of it.
        x_TI: Input of the layer.
        grad_TO: Gradient of its output.
    """
    x_TI = x_TI.detach()  # a deferred gradient must not keep the earlier graph alive
    product = partial(weight_gradient, x_TI, grad_TO, transposed=ctx.transposed)
    if ctx.gradients is None or not ctx.gradients.wait:
        return product()
    ctx.gradients.add(DeferredWeightGrad(parameters=(ctx.parameter,), compute=lambda: (product(),), input=x_TI))
    return None


def _start_replica_sums(grad: torch.Tensor, column: ColumnSpec, *, dim: int) -> list[tuple[torch.Tensor, Pending]]:
    """Start to sum the gradients of replicated heads: each rank has seen only its own queries.

    Returns a list, since torch 2.11 does not compile a generator here.
    """
    started = []
    for own in column.replicated:
        assert column.replica_group is not None, "a layout with replicated heads comes with their group"
        target = grad.narrow(dim, own.start, len(own))
        started.append((target, start_all_reduce(target.contiguous(), group=column.replica_group)))
    return started
