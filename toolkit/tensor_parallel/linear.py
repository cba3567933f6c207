"""Linear layers whose output features (columns) or input features (rows) lie on the ranks of a tensor group.

Y = X·Aᵀ + b. Columns: A = [A₁; …; Aₙ], rank i gives Yᵢ = X·Aᵢᵀ + bᵢ. Rows: A = [A₁, …, Aₙ], rank i holds the columns Xᵢ of
X, and Y = Σ Xᵢ·Aᵢᵀ + b. A pair of them, with any elementwise function between, needs one all-reduce forward and one backward.

T: tokens (batch × sequence), I: input features, O: output features, of this rank.

Source:
    arXiv 1909.08053, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from toolkit.groups.collectives import Pending, start_all_reduce
from toolkit.tensor_parallel.layout import Layout, Shard


class ShardedLinear(nn.Module):
    """What columns and rows share: a slice of a dense layer's weight, stored in the dense layer's orientation.

    Args:
        dense: `nn.Linear`, or transformers' `Conv1D`, whose weight is (in, out).
        shards: How each of its parameters is cut; the others stay whole.
        tp_group: Ranks that hold the other slices.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, dense: nn.Module, shards: dict[str, Shard], *, tp_group: dist.ProcessGroup) -> None:
        super().__init__()
        self.tp_group = tp_group
        self.shards = shards
        self.transposed = isinstance(dense, Conv1D)
        for name in ("weight", "bias"):
            parameter = getattr(dense, name)
            if name in shards and parameter is not None:
                parameter = sharded_parameter(parameter, shards[name], tp_group=tp_group)
            self.register_parameter(name, parameter)

    @property
    def weight_OI(self) -> torch.Tensor:  # noqa: N802
        """The weight as (out, in)."""
        return self.weight.t() if self.transposed else self.weight

    @property
    def out_features(self) -> int:
        """Output features on this rank."""
        return self.weight_OI.shape[0]

    @property
    def in_features(self) -> int:
        """Input features on this rank."""
        return self.weight_OI.shape[1]

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"rank {self.tp_group.rank()} of {self.tp_group.size()}"
        )


class ColumnParallelLinear(ShardedLinear):
    """Holds some output features; its input is whole and its output stays on this rank.

    Columns that read one input, such as query, key and value, are told of each other by `share_input`: the first that
    is called computes for all, so that their input's gradient is reduced once.

    Args:
        dense: Layer to slice.
        layout: Of its output features.
        tp_group: Ranks that hold the others.
        replica_group: Ranks that hold the same heads as this one, where the layout has fewer heads than ranks.

    Collectives:
        forward: none; backward: all-reduce of the input's gradient over `tp_group`, which runs while the weights'
        gradients are computed; all-reduce of the replicated heads' gradients over `replica_group`.
    """

    def __init__(
        self,
        dense: nn.Module,
        layout: Layout,
        *,
        tp_group: dist.ProcessGroup,
        replica_group: dist.ProcessGroup | None = None,
    ) -> None:
        shard = Shard(dim=1 if isinstance(dense, Conv1D) else 0, layout=layout, dense_length=output_features(dense))
        bias_shard = Shard(dim=0, layout=layout, dense_length=shard.dense_length)
        super().__init__(dense, {"weight": shard, "bias": bias_shard}, tp_group=tp_group)
        self.replica_group = replica_group
        self.replicated = tuple(_replicated(layout, tp_group))
        self._shared = SharedInput((self,))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Gives this rank's output features. Shapes (…, in) to (…, out / tp)."""
        return self._shared.output_of(self, x)


class RowParallelLinear(ShardedLinear):
    """Holds some input features, of which its input is this rank's; its output is whole, and the bias is added once.

    Args:
        dense: Layer to slice.
        layout: Of its input features.
        tp_group: Ranks that hold the others.

    Collectives:
        forward: all-reduce of the output over `tp_group`; backward: none.
    """

    def __init__(self, dense: nn.Module, layout: Layout, *, tp_group: dist.ProcessGroup) -> None:
        shard = Shard(dim=0 if isinstance(dense, Conv1D) else 1, layout=layout, dense_length=layout.length)
        super().__init__(dense, {"weight": shard}, tp_group=tp_group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Gives the whole output. Shapes (…, in / tp) to (…, out)."""
        return _RowLinear.apply(x, self.weight, self.bias, self.transposed, self.tp_group)  # type: ignore[no-any-return, no-untyped-call]


class SharedInput:
    """Columns that read one tensor, computed together at the first call; each takes its output when it is called.

    One function of all of them sums the gradients of their input before it is reduced: one all-reduce instead of one a
    layer, hidden behind all their weight gradients.

    Args:
        columns: Layers that are called with the same tensor in each forward pass.
    """

    def __init__(self, columns: Sequence[ColumnParallelLinear]) -> None:
        self._columns = tuple(columns)
        self._input: torch.Tensor | None = None
        self._version = 0
        self._outputs: dict[ColumnParallelLinear, torch.Tensor] = {}

    def output_of(self, column: ColumnParallelLinear, x: torch.Tensor) -> torch.Tensor:
        """Gives a column's output for `x`, and keeps it no longer."""
        # Neither a traced tensor nor one of inference mode counts what is written to it.
        version = 0 if torch.compiler.is_compiling() or x.is_inference() else x._version
        if x is not self._input or version != self._version or column not in self._outputs:
            self._input, self._version = x, version
            self._outputs = dict(zip(self._columns, _linear_together(x, self._columns), strict=True))
        output = self._outputs.pop(column)
        if not self._outputs:
            self._input = None
        return output


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer of numbers, with its weight as it is; one of quantised weights is not."""
    if not isinstance(module, nn.Linear | Conv1D):
        return False
    weight = module.get_parameter("weight")
    return weight.dim() == 2 and weight.is_floating_point()


def output_features(dense: nn.Module) -> int:
    """Gives the length of a linear layer's output."""
    return dense.get_parameter("weight").shape[1 if isinstance(dense, Conv1D) else 0]


def input_features(dense: nn.Module) -> int:
    """Gives the length of a linear layer's input."""
    return dense.get_parameter("weight").shape[0 if isinstance(dense, Conv1D) else 1]


def share_input(columns: Sequence[ColumnParallelLinear]) -> None:
    """Tells columns that they read one input, so that they compute together.

    Under ZeRO-3, which gathers each module's parameters when it is called, the decoder layer must gather its parameters
    as one: `deepspeed.utils.set_z3_leaf_modules(model, [layer_class])`.
    """
    shared = SharedInput(columns)
    for column in columns:
        column._shared = shared


def sharded_parameter(dense: nn.Parameter, shard: Shard, *, tp_group: dist.ProcessGroup) -> nn.Parameter:
    """Cuts this rank's shard out of a dense parameter, as a parameter of its own."""
    local = shard.take(dense.detach(), rank=tp_group.rank(), num_ranks=tp_group.size())
    return nn.Parameter(local, requires_grad=dense.requires_grad)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    """What the backward pass must know of a column besides its weight."""

    transposed: bool
    has_bias: bool
    replicated: tuple[range, ...]
    replica_group: dist.ProcessGroup | None


def _linear_together(x: torch.Tensor, layers: Sequence[ColumnParallelLinear]) -> tuple[torch.Tensor, ...]:
    columns = tuple(
        _Column(
            transposed=layer.transposed,
            has_bias=layer.bias is not None,
            replicated=layer.replicated,
            replica_group=layer.replica_group,
        )
        for layer in layers
    )
    parameters = [parameter for layer in layers for parameter in (layer.weight, layer.bias)]
    return _ColumnLinears.apply(x, columns, layers[0].tp_group, *parameters)  # type: ignore[no-any-return, no-untyped-call]


class _ColumnLinears(Function):
    """Several columns of one input. Parameters come as weight, bias, weight, bias, …"""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, columns: tuple[_Column, ...], group: dist.ProcessGroup, *parameters: torch.Tensor
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
            if column.has_bias and ctx.needs_input_grad[4 + 2 * index]:
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
    columns: Sequence[_Column], weights: Sequence[torch.Tensor], grads_TO: dict[int, torch.Tensor]
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


def _start_replica_sums(grad: torch.Tensor, column: _Column, *, dim: int) -> Iterator[tuple[torch.Tensor, Pending]]:
    """Starts to sum the gradients of heads that other ranks hold too: each has seen its own queries alone."""
    for own in column.replicated:
        assert column.replica_group is not None, "a layout with replicated heads comes with their group"
        target = grad.narrow(dim, own.start, len(own))
        yield target, start_all_reduce(target.contiguous(), group=column.replica_group)


def _replicated(layout: Layout, group: dist.ProcessGroup) -> Iterator[range]:
    """Gives the ranges of this rank's shard, counted in the shard, that other ranks hold too."""
    start = 0
    owners = layout.owners(group.size())
    for own, count in zip(layout.ranges(group.rank(), group.size()), owners, strict=True):
        if count > 1:
            yield range(start, start + len(own))
        start += len(own)
