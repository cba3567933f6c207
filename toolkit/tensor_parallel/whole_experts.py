"""Stacked experts of a mixture, each of them whole on one rank of a tensor group (expert parallelism).

Every rank of the group has all tokens and the same routing, so that nothing is dispatched: a rank picks the rows of its own experts, computes
them, and the sum over the ranks joins all choices of a token. That is an all-reduce forward and one backward, the same bytes as of sliced
experts (`toolkit.tensor_parallel.experts`), for fewer rows and wider matrix products.

With sequence parallelism each rank routes the tokens of its shard. Where a token chooses fewer experts than there are ranks, an all-to-all
sends it to each rank that owns one of them, once, and a second one returns those ranks' sums: at most K / tp of the bytes that all ranks would
need to see all tokens. Elsewhere most ranks own an expert of most tokens, and an all-gather and a reduce-scatter, whose sizes the host knows
beforehand, are the shorter way.

N: tokens, K: choices of a token, R: rows of this rank, pairs of a token and one of its choices, D: width, n: tokens of a rank's shard,
S: tokens that it sends, T: those that it receives.

Source:
    arXiv 2101.03961, section 2.2, for the placement; megatron-core transformer/moe/token_dispatcher.py MoEAllGatherTokenDispatcher and
    MoEAlltoAllTokenDispatcher, which sends a token once for each choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function
from transformers.integrations import moe

from toolkit.distributed.collectives import all_gather
from toolkit.distributed.exchange import exchange_pieces, exchange_rows
from toolkit.tensor_parallel.autograd import (
    copy_to_region,
    gather_from_sequence,
    reduce_from_region,
    reduce_scatter_to_sequence,
)
from toolkit.tensor_parallel.layout import Layout, Part, Shard
from toolkit.tensor_parallel.linear import sharded_parameter

# Attributes with the number of stacked experts.
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "num_routed_experts", "n_experts")


def place_experts(experts: nn.Module, *, tp_group: dist.ProcessGroup, sequence_parallel: bool = False) -> None:
    """Leave a rank's own experts in a module, which keeps its class and its matrix products.

    A rank none of whose experts is chosen computes one row of zeros, so that every parameter has a gradient and the ranks' collectives
    match.

    Args:
        experts: Stacked experts, called with hidden states, chosen experts and their weights.
        tp_group: Ranks that share them out.
        sequence_parallel: Whether each rank calls its own with other tokens, equally many.

    Collectives:
        forward: all-reduce of the output; backward: all-reduce of the gradients of the input and of the routing weights. With
        `sequence_parallel` forward: all-gather of the input and its routing, reduce-scatter of the output; or, where a token chooses fewer
        experts than there are ranks, all-to-alls of how many tokens go where, of these and their routing, and of the output. Backward: the
        duals.
    """
    shards = whole_expert_shards(experts)
    count, own = num_experts(experts), num_experts(experts) // tp_group.size()
    first = tp_group.rank() * own
    experts.shards = shards  # type: ignore[assignment]
    for name, shard in shards.items():
        experts.register_parameter(name, sharded_parameter(experts.get_parameter(name), shard, tp_group=tp_group))
    for name in _COUNTS:
        if getattr(experts, name, None) == count:
            setattr(experts, name, own)

    def compute(module: Any, call: _Call, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the sums of what this rank's experts compute for tokens that may have chosen them. Shapes (N, D) to (N, D)."""
        rows = _Rows.of(ids, first=first, count=own, by_expert=_runs_grouped(module))
        inputs, chosen = rows.take(x), rows.weights(weights)
        if _runs_grouped(module):
            output = _grouped(module, inputs, rows.experts, chosen, count=own)
        else:
            args, kwargs = call.replaced(inputs, rows.experts.unsqueeze(-1), chosen)
            output = type(module).forward(module, *args, **kwargs)
        return rows.add(output, num_tokens=len(ids), dtype=x.dtype)

    def forward(module: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        call = _Call.of(args, kwargs)
        x, ids, weights = call.x.flatten(0, -2), call.ids, call.weights
        if sequence_parallel and ids.shape[-1] < tp_group.size():
            sent = _Dispatch.of(ids, experts_per_rank=own, tp_group=tp_group)
            return sent.combine(compute(module, call, *sent.dispatch(x, ids, weights)), like=x).view(call.x.shape)
        if sequence_parallel:
            x, weights = (gather_from_sequence(each, dim=0, tp_group=tp_group) for each in (x, weights))
            summed = compute(module, call, x, all_gather(ids, dim=0, group=tp_group), weights)
            return reduce_scatter_to_sequence(summed, dim=0, tp_group=tp_group).view(call.x.shape)
        x, weights = (copy_to_region(each, tp_group=tp_group) for each in (x, weights))
        return reduce_from_region(compute(module, call, x, ids, weights), tp_group=tp_group).view(call.x.shape)

    experts.forward = MethodType(forward, experts)


def _runs_grouped(experts: Any) -> bool:
    """Return whether a module's experts are grouped matrix products of transformers, which `_grouped` calls without its permutations."""
    config = getattr(experts, "config", None)
    return hasattr(experts, "is_transposed") and getattr(config, "_experts_implementation", None) == "grouped_mm"


def _grouped(experts: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *, count: int) -> torch.Tensor:
    """Return the weighted outputs of rows in the order of their experts, each a product for every matrix. Shapes (R, D) to (R, D).

    Source:
        transformers integrations/moe.py grouped_mm_experts_forward.
    """
    ends = torch.searchsorted(ids, torch.arange(count, device=ids.device), right=True, out_int32=True)

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        bias = getattr(experts, f"{name}_bias")[ids] if experts.has_bias else None
        weight = getattr(experts, name)
        product: torch.Tensor = moe._grouped_linear(x, weight, ends, bias=bias, is_transposed=experts.is_transposed)
        return product

    gated = experts._apply_gate(linear(x, "gate_up_proj")) if experts.has_gate else experts.act_fn(linear(x, "up_proj"))
    output = linear(gated, "down_proj")
    if getattr(experts, "has_post_expert_norm", False):
        output = experts.post_expert_norm(output)
    return output * weights


def whole_expert_shards(experts: nn.Module) -> dict[str, Shard]:
    """Return how the parameters of stacked experts are shared out, each with a first dimension of all experts."""
    count = num_experts(experts)
    layout = Layout(parts=(Part(num_units=count),))
    names = [name for name, weight in experts._parameters.items() if weight is not None]
    return {name: Shard(dim=0, layout=layout, dense_length=count) for name in names}


def num_experts(experts: nn.Module) -> int:
    """Return how many experts are stacked in a module."""
    return len(experts.get_parameter("down_proj"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """The arguments of a call of stacked experts.

    Args:
        x: Hidden states. Shape (…, D).
        ids: Experts that each token chose. Shape (N, K).
        weights: Their weights. Shape (N, K).
        args: Positional arguments.
        kwargs: Arguments by keyword.
    """

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        """Tell hidden states, chosen experts and their weights apart.

        Raises:
            ValueError: If the call has others, or weights of another shape.
        """
        given = [*args, *kwargs.values()]
        tensors = [value for value in given if isinstance(value, torch.Tensor)]
        floats = [value for value in tensors if value.is_floating_point()]
        others = [value for value in tensors if not value.is_floating_point()]
        if len(given) != 3 or len(floats) != 2 or len(others) != 1 or floats[1].shape != others[0].shape:
            raise ValueError(
                "its experts are not called with hidden states, chosen experts and a weight for each of these"
            )
        return cls(x=floats[0], ids=others[0], weights=floats[1], args=args, kwargs=kwargs)

    def replaced(self, *values: torch.Tensor) -> tuple[Any, Any]:
        """Return the arguments with other hidden states, chosen experts and weights."""
        found = dict(zip(map(id, (self.x, self.ids, self.weights)), values, strict=True))
        return tuple(found[id(each)] for each in self.args), {
            name: found[id(each)] for name, each in self.kwargs.items()
        }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Dispatch:
    """Which tokens of this rank's shard go to which rank of the group, and how many come from each.

    Args:
        tokens: Tokens for the first rank, then those for the second, and so on. Shape (S,).
        sent: How many go to each rank; S together.
        received: How many come from each; T together.
        tp_group: The ranks.
    """

    tokens: torch.Tensor
    sent: list[int]
    received: list[int]
    tp_group: dist.ProcessGroup

    @classmethod
    def of(cls, ids: torch.Tensor, *, experts_per_rank: int, tp_group: dist.ProcessGroup) -> _Dispatch:
        """Send each token once to every rank that owns an expert which it chose. The host waits for the numbers.

        Args:
            ids: Experts that each token chose. Shape (n, K).
            experts_per_rank: Experts of each rank.
            tp_group: The ranks.
        """
        num_ranks, num_tokens = tp_group.size(), len(ids)
        owners = (ids // experts_per_rank).T
        goes = torch.zeros((num_ranks, num_tokens), dtype=torch.bool, device=ids.device).scatter_(0, owners, True)
        places = torch.arange(num_tokens, device=ids.device).expand_as(goes)
        tokens, counts = torch.masked_select(places, goes), goes.sum(1)
        numbers = torch.cat([counts, exchange_pieces(counts, group=tp_group)]).cpu()
        sizes = [int(number) for number in numbers.unbind()]
        return cls(tokens=tokens, sent=sizes[:num_ranks], received=sizes[num_ranks:], tp_group=tp_group)

    def dispatch(self, x: torch.Tensor, *routing: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return hidden states, chosen experts and their weights of the tokens that come to this rank; one of zeros if none comes.

        Shapes (n, D), (n, K), (n, K) to (T, D), (T, K), (T, K).
        """
        rows = [_Take.apply(x, self.tokens), *(each.index_select(0, self.tokens) for each in routing)]  # type: ignore[no-untyped-call]
        found = [self._exchange(each, self.sent, self.received) for each in rows]
        return tuple(found) if self._any else tuple(nn.functional.pad(each, (0, 0, 0, 1)) for each in found)

    def combine(self, summed: torch.Tensor, *, like: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks of what they computed for each token. Shapes (T, D) to (n, D)."""
        returned = self._exchange(summed if self._any else summed[:0], self.received, self.sent)
        total: torch.Tensor = _Add.apply(returned, self.tokens, len(like), like.dtype)  # type: ignore[no-untyped-call]
        return total

    @property
    def _any(self) -> bool:
        return sum(self.received) > 0

    def _exchange(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        return exchange_rows(rows, sent=sent, received=received, group=self.tp_group)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Which pairs of a token and a choice are rows of this rank.

    Args:
        positions: Places of its pairs among all, token by token. Shape (R,).
        tokens: Token of each of them. Shape (R,).
        experts: Expert of each of them, counted from the rank's first. Shape (R,).
        empty: Whether no token chose any of its experts, so that the only row is of zeros.
    """

    positions: torch.Tensor
    tokens: torch.Tensor
    experts: torch.Tensor
    empty: bool

    @classmethod
    def of(cls, ids: torch.Tensor, *, first: int, count: int, by_expert: bool) -> _Rows:
        """Find the pairs of `count` experts from `first` on, in the order of the experts or of the tokens.

        The host waits for their number.
        """
        chosen = ids.flatten() - first
        positions = torch.masked_select(torch.arange(len(chosen), device=ids.device), (chosen >= 0) & (chosen < count))
        empty = len(positions) == 0
        if empty:
            positions = positions.new_zeros(1)
        experts = torch.zeros_like(positions) if empty else chosen[positions]
        if by_expert:
            experts, order = experts.sort(stable=True)
            positions = positions[order]
        return cls(positions=positions, tokens=positions // ids.shape[-1], experts=experts, empty=empty)

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """Return the hidden states of the rows. Shapes (N, D) to (R, D)."""
        rows: torch.Tensor = _Take.apply(x, self.tokens)  # type: ignore[no-untyped-call]
        return rows * 0 if self.empty else rows

    def weights(self, weights: torch.Tensor) -> torch.Tensor:
        """Return the weights of the rows. Shapes (N, K) to (R, 1)."""
        chosen = weights.flatten()[self.positions]
        return (chosen * 0 if self.empty else chosen).unsqueeze(-1)

    def add(self, rows: torch.Tensor, *, num_tokens: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the sum of each token's rows. Shapes (R, D) to (N, D)."""
        summed: torch.Tensor = _Add.apply(rows, self.tokens, num_tokens, dtype)  # type: ignore[no-untyped-call]
        return summed


class _Take(Function):
    """Rows of given tokens; backward the sum of each token's rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tokens)
        ctx.num_tokens, ctx.dtype = len(x), x.dtype
        return x.index_select(0, tokens)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        [tokens] = ctx.saved_tensors
        return _Add.apply(grads[0], tokens, ctx.num_tokens, ctx.dtype), None  # type: ignore[no-untyped-call]


class _Add(Function):
    """The sum of each token's rows, accumulated in fp32; backward the rows of given tokens."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, tokens: torch.Tensor, num_tokens: int, dtype: torch.dtype
    ) -> torch.Tensor:
        ctx.save_for_backward(tokens)
        ctx.dtype = rows.dtype
        wide = rows if rows.dtype == torch.float64 else rows.float()
        return wide.new_zeros((num_tokens, rows.shape[-1])).index_add_(0, tokens, wide).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        [tokens] = ctx.saved_tensors
        taken: torch.Tensor = _Take.apply(grads[0], tokens)  # type: ignore[no-untyped-call]
        return taken.to(ctx.dtype), None, None, None
