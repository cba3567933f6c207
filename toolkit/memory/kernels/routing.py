"""Mixture of experts: what a trace assumes about the routing, and the worst case."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedConfig

# How tokens spread over experts: evenly, or all of them to the same few.
Routing = Literal["balanced", "worst"]

# transformers integrations/moe.py grouped_mm_experts_forward: one row for each token and chosen expert, sorted; the
# default on every device (modeling_utils.py get_correct_experts_implementation).
GROUPED = (
    "Experts run as grouped matrix products: one row per token and chosen expert, so memory does not depend on the "
    "routing"
)
LOOPED = {
    "balanced": "Experts run one after the other, and each is assumed to get the same number of tokens",
    "worst": "Experts run one after the other, and all tokens are assumed to choose the same ones",
}


WHOLE = {
    "balanced": "Experts are whole on their tensor ranks, and the tokens' choices are assumed to spread evenly over the ranks",
    "worst": "Experts are whole on their tensor ranks, and all tokens are assumed to choose experts of one rank",
}


class RowsOfRank:
    """Results of the operations by which whole experts (`toolkit.tensor_parallel.whole_experts`) pick rows and ranks.

    A selection by a mask of shape (ranks, tokens) is that of the tokens that go to each rank, whose numbers are then read, and those of the
    tokens that come; one by a mask of pairs of tokens and choices is that of the rows of the rank's own experts.

    Args:
        config: Configuration of the model.
        routing: How tokens spread over ranks.
        num_ranks: Ranks that have equally many of the experts.
    """

    def __init__(self, config: PreTrainedConfig, routing: Routing, *, num_ranks: int) -> None:
        self.routing = routing
        self._num_ranks = num_ranks
        self._own = max(_expert_counts(config), default=num_ranks) // num_ranks
        self._num_choices = max(_choices(config), default=1)
        self._numbers: Iterator[int] = iter(())
        self._of_dispatched = False

    def __call__(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return as many places as the routing gives this rank, or their number; NotImplemented for any other operation."""
        if function is torch.ops.aten._local_scalar_dense.default:
            return next(self._numbers, NotImplemented)
        if function is not torch.ops.aten.masked_select.default:
            return NotImplemented
        places, mask = args
        rows = self._sent(mask.shape[1]) if mask.ndim == 2 else self._rows(mask.numel())
        return places.new_empty((max(1, rows),))

    def _sent(self, num_tokens: int) -> int:
        """Return how many tokens go to all ranks: each to as many as it has choices, and in the worst case all tokens come here."""
        sent = num_tokens * min(self._num_choices, self._num_ranks)
        each = [sent // self._num_ranks + (rank < sent % self._num_ranks) for rank in range(self._num_ranks)]
        self._numbers = iter([*each, *(each if self.routing == "balanced" else [num_tokens] * self._num_ranks)])
        self._of_dispatched = True
        return sent

    def _rows(self, pairs: int) -> int:
        of_dispatched, self._of_dispatched = self._of_dispatched, False
        if self.routing == "worst":  # a token chooses an expert at most once
            return pairs // self._num_choices * min(self._num_choices, self._own)
        return pairs // self._num_choices if of_dispatched else -(-pairs // self._num_ranks)


class LoopedExperts:
    """Results of operations by which a loop over experts reads the routing, which fake tensors do not know.

    Such loops take the experts that were hit from `mask.sum(...).nonzero()` and each one's tokens from
    `torch.where(mask[expert])`, a mask of shape (choices, tokens); or they split the rows by the list
    `gates.sum(0).tolist()`, gates of shape (tokens, experts).

    Args:
        config: Configuration of the model.
        routing: How tokens spread over experts.
        num_ranks: Ranks that have some of the experts each; 1 where a rank has all, or a slice of each.

    Source:
        transformers models/dbrx/modeling_dbrx.py DbrxExperts.forward, models/jetmoe/modeling_jetmoe.py
        JetMoeTopKGating.forward, and others without `use_experts_implementation`.
    """

    def __init__(self, config: PreTrainedConfig, routing: Routing, *, num_ranks: int = 1) -> None:
        self.routing = routing
        self.asked = False
        self._counts = {count // num_ranks for count in _expert_counts(config)}
        self._num_hit = 1
        self._num_choices = max(_choices(config), default=1)
        self._shares: Iterator[int] = iter(())

    def __call__(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of an operation whose result depends on the routing; NotImplemented for any other."""
        aten = torch.ops.aten
        if function is aten._local_scalar_dense.default:
            return False if args[0].dtype == torch.bool else next(self._shares, 0)
        if function is aten.sum.dim_IntList and args[0].ndim == 2 and args[0].shape[1] in self._counts:
            if not args[0].is_floating_point() and tuple(args[1]) == (0,):
                self._shares = self._share_out(*args[0].shape)
            return NotImplemented
        if function is not aten.nonzero.default:
            return NotImplemented
        self.asked = True
        mask = args[0]
        return mask.new_empty((self._rows(mask.shape), mask.ndim), dtype=torch.int64)

    def _share_out(self, num_tokens: int, num_experts: int) -> Iterator[int]:
        """Yield how many rows each expert gets, one expert after the other, and record that the routing was read."""
        rows = num_tokens * self._num_choices
        for expert in range(num_experts):
            self.asked = True
            if self.routing == "worst":
                yield num_tokens if expert < self._num_choices else 0
            else:
                yield rows // num_experts + (expert < rows % num_experts)

    def _rows(self, shape: torch.Size) -> int:
        if len(shape) == 1:  # experts that were hit; an additional class means no expert
            experts = shape[0] - (shape[0] - 1 in self._counts)
            self._num_hit = experts if self.routing == "balanced" else min(experts, self._num_choices)
            return self._num_hit
        return max(1, shape[0] * shape[-1] // self._num_hit)


def assumptions(model: nn.Module, looped: LoopedExperts | None, own: RowsOfRank | None = None) -> tuple[str, ...]:
    """Return what the sizes of a mixture of experts assume; nothing for a dense model."""
    if own is not None:
        return (WHOLE[own.routing],)
    if looped is not None and looped.asked:
        return (LOOPED[looped.routing],)
    return (GROUPED,) if runs_grouped(model) else ()


def runs_grouped(model: nn.Module) -> bool:
    """Return whether the experts of a model go through transformers' own kernels (`use_experts_implementation`)."""
    experts: list[Any] = [module for module in model.modules() if hasattr(module, "_apply_gate")]
    return any(module.config._experts_implementation != "eager" for module in experts)


def has_experts(config: PreTrainedConfig) -> bool:
    """Return whether a configuration names a number of experts."""
    return bool(_expert_counts(config))


def collects_router_logits(config: PreTrainedConfig) -> bool:
    """Return whether the loss needs the router logits of every layer, so that no layer can represent another.

    Source:
        transformers models/mixtral/modeling_mixtral.py load_balancing_loss_func.
    """
    return bool(getattr(config.get_text_config(decoder=True), "output_router_logits", False))


def _expert_counts(config: PreTrainedConfig) -> set[int]:
    """Return how many experts a layer chooses from, whatever the name of the key."""
    return {value for name, value in _numbers(config) if name.endswith("experts") and value > 1}


def _choices(config: PreTrainedConfig) -> set[int]:
    return {value for name, value in _numbers(config) if "top" in name or "per_tok" in name}


def _numbers(config: PreTrainedConfig) -> list[tuple[str, int]]:
    text = config.get_text_config(decoder=True)
    parts = [text, *(value for value in vars(text).values() if isinstance(value, PreTrainedConfig))]
    return [(name, value) for part in parts for name, value in vars(part).items() if type(value) is int]
