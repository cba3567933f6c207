"""Differentiable collectives at the entry and exit of a tensor-parallel region; each backward pass is the dual collective.

Outside a region every rank of the group has the same tensor, or with sequence parallelism its shard of the sequence;
inside, each has the output of its shards of the weights.

| function | forward | backward | from | to |
|---|---|---|---|---|
| `copy_to_region` | identity | all-reduce | whole | whole, read by shards |
| `reduce_from_region` | all-reduce | identity | partial sums | whole |
| `scatter_to_region` | own shard | all-gather | whole | shard |
| `gather_from_region` | all-gather | own shard | shard | whole |
| `gather_from_sequence` | all-gather | reduce-scatter | shard | whole, read by shards |
| `reduce_scatter_to_sequence` | reduce-scatter | all-gather | partial sums | shard |

Rows of different numbers go to other ranks by `toolkit.distributed.exchange`.
Each backward pass calls the function of its dual, so second derivatives are right too.

Source:
    arXiv 1909.08053, section 3 (f and g); arXiv 2205.05198, section 4.2.2 (their sequence-parallel duals).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function
from torch.utils._pytree import tree_map

from toolkit.distributed.collectives import all_gather, all_reduce, equal_pieces, reduce_scatter

# The sequence is the dimension before the features.
SEQUENCE_DIM = -2


def copy_to_region(x: torch.Tensor, *, tp_group: dist.ProcessGroup) -> torch.Tensor:
    """Return `x` unchanged; its gradient is summed over the ranks.

    Collectives:
        forward: none; backward: all-reduce, the size of `x`.
    """
    return _Copy.apply(x, tp_group)  # type: ignore[no-any-return, no-untyped-call]


def reduce_from_region(x: torch.Tensor, *, tp_group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum of the partial sums of all ranks.

    Collectives:
        forward: all-reduce, the size of `x`; backward: none.
    """
    return _Reduce.apply(x, tp_group)  # type: ignore[no-any-return, no-untyped-call]


def scatter_to_region(x: torch.Tensor, *, dim: int, tp_group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's shard along `dim` of an `x` that is the same on all ranks.

    Collectives:
        forward: none; backward: all-gather, the size of `x`.
    """
    return _Scatter.apply(x, dim, tp_group)  # type: ignore[no-any-return, no-untyped-call]


def gather_from_region(x: torch.Tensor, *, dim: int, tp_group: dist.ProcessGroup) -> torch.Tensor:
    """Gather the ranks' shards along `dim`, for a consumer that computes the same on all ranks.

    Collectives:
        forward: all-gather, the size of the result; backward: none.
    """
    return _Gather.apply(x, dim, tp_group)  # type: ignore[no-any-return, no-untyped-call]


def gather_from_sequence(x: torch.Tensor, *, dim: int, tp_group: dist.ProcessGroup) -> torch.Tensor:
    """Gather the ranks' shards of the sequence, for weight shards that each compute a different output from it.

    Collectives:
        forward: all-gather, the size of the result; backward: reduce-scatter of the same size.
    """
    return _GatherSequence.apply(x, dim, tp_group)  # type: ignore[no-any-return, no-untyped-call]


def reduce_scatter_to_sequence(x: torch.Tensor, *, dim: int, tp_group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's shard, along the sequence, of the sum of the partial sums of all ranks.

    Collectives:
        forward: reduce-scatter, the size of `x`; backward: all-gather of the same size.
    """
    return _ReduceScatterSequence.apply(x, dim, tp_group)  # type: ignore[no-any-return, no-untyped-call]


def enter_region(module: nn.Module, *, tp_group: dist.ProcessGroup) -> None:
    """Make a whole module a region: the gradient of each of its inputs is summed over the ranks.

    Collectives:
        forward: none; backward: all-reduce, the size of the inputs that require a gradient.
    """

    def copied(value: Any) -> Any:
        needs = isinstance(value, torch.Tensor) and value.is_floating_point() and value.requires_grad
        return copy_to_region(value, tp_group=tp_group) if needs else value

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return tree_map(copied, args), {name: tree_map(copied, value) for name, value in kwargs.items()}

    module.register_forward_pre_hook(hook, with_kwargs=True)


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _Reduce.apply(grads[0], ctx.group), None  # type: ignore[no-untyped-call]


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return all_reduce(x, group=group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _Copy.apply(grads[0], ctx.group), None  # type: ignore[no-untyped-call]


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        return equal_pieces(x, group.size(), dim=dim)[group.rank()].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _Gather.apply(grads[0], ctx.dim, ctx.group), None, None  # type: ignore[no-untyped-call]


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gather(x, dim=dim, group=group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _Scatter.apply(grads[0], ctx.dim, ctx.group), None, None  # type: ignore[no-untyped-call]


class _GatherSequence(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gather(x, dim=dim, group=group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _ReduceScatterSequence.apply(grads[0], ctx.dim, ctx.group), None, None  # type: ignore[no-untyped-call]


class _ReduceScatterSequence(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        return reduce_scatter(x, dim=dim, group=group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _GatherSequence.apply(grads[0], ctx.dim, ctx.group), None, None  # type: ignore[no-untyped-call]
