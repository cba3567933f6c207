"""Linear layers whose output features (columns) or input features (rows) are sharded over a tensor group.

Y = X·Aᵀ + b. Columns: A = [A₁; …; Aₙ], rank i computes Yᵢ = X·Aᵢᵀ + bᵢ. Rows: A = [A₁, …, Aₙ], rank i has the columns Xᵢ
of X, and Y = Σ Xᵢ·Aᵢᵀ + b. A pair of them, with any elementwise function between, needs one all-reduce forward and one
backward.

Source:
    arXiv 1909.08053, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from transformers.pytorch_utils import Conv1D

from toolkit.distributed.collectives import start_all_gather
from toolkit.tensor_parallel.autograd import SEQUENCE_DIM, gather_from_sequence
from toolkit.tensor_parallel.deferred_grads import WeightGradStore
from toolkit.tensor_parallel.layout import Layout, Shard
from toolkit.tensor_parallel.ops import ColumnSpec, column_linears, row_linear

Reads = Literal["whole", "piece", "gathered"]


class ShardedLinear(nn.Module):
    """Base of column- and row-parallel layers: a slice of a dense layer's weight, stored in the dense layer's orientation.

    Args:
        dense: `nn.Linear`, or transformers' `Conv1D`, whose weight is (in, out).
        shards: How each of its parameters is sharded; the others stay whole.
        tp_group: Ranks that share the weight.

    Attributes:
        weight_gradients: Store that defers the weight gradients; None if they are never deferred.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    weight_gradients: WeightGradStore | None = None

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
        # Features on this rank; under ZeRO-3 the weight has no shape between its uses.
        self.out_features, self.in_features = self.weight_OI.shape

    @property
    def weight_OI(self) -> torch.Tensor:  # noqa: N802
        """The weight in shape (out, in)."""
        return self.weight.t() if self.transposed else self.weight

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"rank {self.tp_group.rank()} of {self.tp_group.size()}"
        )


class ColumnParallelLinear(ShardedLinear):
    """Linear layer with some of the output features on each rank; its input is whole and its output stays sharded.

    Columns that read one input, such as query, key and value, are linked by `share_input`: the first that is
    called computes for all, so that the gradient of their input is reduced once.

    Args:
        dense: Layer to shard.
        layout: Layout of its output features.
        tp_group: Ranks that share the output features.
        replica_group: Ranks that have the same heads as this one, if there are fewer heads than ranks.

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
        super().__init__(dense, column_shards(dense, layout), tp_group=tp_group)
        replicated = tuple(_replicated(layout, tp_group))
        self.spec = ColumnSpec(transposed=self.transposed, replicated=replicated, replica_group=replica_group)
        self.place = 0
        self._shared = SharedInput((self,))

    @property
    def reads(self) -> Reads:
        """Kind of its input, in the terms of `SharedInput`."""
        return self._shared.reads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's output features. Shapes (…, in) to (…, out / tp)."""
        return self._shared.output_of(self, x)


class RowParallelLinear(ShardedLinear):
    """Linear layer with some of the input features on each rank; its input is sharded, its output whole, its bias added once.

    Args:
        dense: Layer to shard.
        layout: Layout of its input features.
        tp_group: Ranks that share the input features.
        sequence_parallel: Whether the output is this rank's shard of the sequence, its second-to-last dimension.

    Collectives:
        forward: all-reduce of the output over `tp_group`; backward: none. With `sequence_parallel`, forward:
        reduce-scatter; backward: all-gather.
    """

    def __init__(
        self, dense: nn.Module, layout: Layout, *, tp_group: dist.ProcessGroup, sequence_parallel: bool = False
    ) -> None:
        super().__init__(dense, row_shards(dense, layout), tp_group=tp_group)
        self.sequence_parallel = sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output. Shapes (…, seq, in / tp) to (…, seq, out), or (…, seq / tp, out) with `sequence_parallel`."""
        return row_linear(
            x,
            self.weight,
            self.bias,
            transposed=self.transposed,
            tp_group=self.tp_group,
            to_piece=self.sequence_parallel,
            gradients=self.weight_gradients,
        )


class SharedInput:
    """Columns with the same input, computed together when the first is called; each returns its output when it is called.

    One autograd function for all of them sums the gradients of their input before the reduction: one all-reduce instead of
    one per layer, overlapped with the weight gradients of all.

    Args:
        columns: Layers that are called with the same tensor in each forward pass.
        reads: Kind of that tensor: whole on each rank, a shard of the sequence, or whole because `gather` gathered it from
            a shard, which is then all that is kept for the backward pass.
    """

    def __init__(self, columns: Sequence[ColumnParallelLinear], *, reads: Reads = "whole") -> None:
        self._columns = tuple(columns)
        self.reads = reads
        self._input: torch.Tensor | None = None
        self._version = 0
        # By position, not by column: compiled code guards on what it has read, and layers differ in their columns.
        self._outputs: list[torch.Tensor | None] = []
        self._gathered: _Gathered | None = None

    def gather(self, piece: torch.Tensor) -> torch.Tensor:
        """Gather the ranks' shards of the columns' input. Other consumers of the result must be sharded as well.

        Collectives:
            forward: all-gather; backward: reduce-scatter if anything but the columns reads the result.
        """
        whole = gather_from_sequence(piece, dim=SEQUENCE_DIM, tp_group=self._columns[0].tp_group)
        self._gathered = _Gathered(piece=piece, whole=whole, version=_version(whole))
        return whole

    def output_of(self, column: ColumnParallelLinear, x: torch.Tensor) -> torch.Tensor:
        """Return a column's output for `x`, and release it."""
        version, place = _version(x), column.place
        if x is not self._input or version != self._version or not self._outputs or self._outputs[place] is None:
            self._input, self._version = x, version
            self._outputs = list(self._compute(x))
        output = self._outputs[place]
        assert output is not None, "computed above, or before and not taken yet"
        self._outputs[place] = None
        if all(other is None for other in self._outputs):
            self._outputs = []
            self._input = self._gathered = None
        return output

    def _compute(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        specs = tuple(column.spec for column in self._columns)
        parameters = [parameter for column in self._columns for parameter in (column.weight, column.bias)]
        group, known = self._columns[0].tp_group, self._gathered
        compute = partial(column_linears, tp_group=group, gradients=self._columns[0].weight_gradients)
        if self.reads == "whole":
            return compute(x, specs, parameters)
        if self.reads == "piece":
            whole = start_all_gather(x.detach(), dim=SEQUENCE_DIM, group=group).wait()
            return compute(x, specs, parameters, whole=whole)
        if known is not None and known.whole is x and known.version == _version(x):
            return compute(known.piece, specs, parameters, whole=x.detach())
        # Computed from the gathered tensor, as adapters with dropout do: its gradient is summed where that was gathered.
        return compute(x, specs, parameters, reduces=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gathered:
    piece: torch.Tensor
    whole: torch.Tensor
    version: int


def _version(x: torch.Tensor) -> int:
    """Return a tensor's count of in-place writes; 0 for traced tensors and those of inference mode, which have none."""
    return 0 if torch.compiler.is_compiling() or x.is_inference() else x._version


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer with a plain floating-point weight; one with quantised weights is not."""
    if not isinstance(module, nn.Linear | Conv1D):
        return False
    weight = module.get_parameter("weight")
    return weight.dim() == 2 and weight.is_floating_point()


def output_features(dense: nn.Module) -> int:
    """Return the number of a linear layer's output features."""
    return dense.get_parameter("weight").shape[1 if isinstance(dense, Conv1D) else 0]


def input_features(dense: nn.Module) -> int:
    """Return the number of a linear layer's input features."""
    return dense.get_parameter("weight").shape[0 if isinstance(dense, Conv1D) else 1]


def column_shards(dense: nn.Module, layout: Layout) -> dict[str, Shard]:
    """Return how the parameters of a linear layer are sharded by a layout of its output features."""
    length = output_features(dense)
    return {
        "weight": Shard(dim=1 if isinstance(dense, Conv1D) else 0, layout=layout, dense_length=length),
        "bias": Shard(dim=0, layout=layout, dense_length=length),
    }


def row_shards(dense: nn.Module, layout: Layout) -> dict[str, Shard]:
    """Return how the weight of a linear layer is sharded by a layout of its input features; its bias stays whole."""
    return {"weight": Shard(dim=0 if isinstance(dense, Conv1D) else 1, layout=layout, dense_length=layout.length)}


def share_input(columns: Sequence[ColumnParallelLinear], *, reads: Reads = "whole") -> SharedInput:
    """Link columns that read the same input, so that they compute together; `reads` as in `SharedInput`.

    Under ZeRO-3, which gathers each module's parameters when it is called, the decoder layer must gather its parameters
    as one: `deepspeed.utils.set_z3_leaf_modules(model, [layer_class])`.
    """
    shared = SharedInput(columns, reads=reads)
    for place, column in enumerate(columns):
        column._shared, column.place = shared, place
    return shared


def sharded_parameter(dense: nn.Parameter, shard: Shard, *, tp_group: dist.ProcessGroup) -> nn.Parameter:
    """Copy this rank's shard out of a dense parameter, as a new parameter."""
    local = shard.take(dense.detach(), rank=tp_group.rank(), num_ranks=tp_group.size())
    return nn.Parameter(local, requires_grad=dense.requires_grad)


def _replicated(layout: Layout, group: dist.ProcessGroup) -> Iterator[range]:
    """Yield the ranges of this rank's shard, counted within the shard, that other ranks have too."""
    start = 0
    owners = layout.owners(group.size())
    for own, count in zip(layout.ranges(group.rank(), group.size()), owners, strict=True):
        if count > 1:
            yield range(start, start + len(own))
        start += len(own)
