"""Next-token loss of a linear head without its logits: head and cross entropy together, block by block.

T: tokens, D: width, V: vocabulary, v: rows of the head in one block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from toolkit.modeling.loss import IGNORED

# Logits in memory at a time: 6 to 8 bytes each in 16 bits with their fp32 copy, so about 250 MiB; products of this size
# keep a GPU busy.
BLOCK_ELEMENTS = 2**25
# Rows of the head below which a product does not use a whole GPU, whatever the number of tokens.
LEAST_ROWS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitMap:
    """Map of a head's output to the logits: z → cap · tanh(scale · z / cap), or scale · z without a cap.

    Args:
        scale: Factor, as in Cohere and Granite.
        cap: Bound, as in Gemma 2 (arXiv 2408.00118, section 2).
    """

    scale: float = 1.0
    cap: float | None = None

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the mapped logits in fp32."""
        scores = logits.float()
        if self.scale != 1:
            scores = scores * self.scale
        return scores if self.cap is None else torch.tanh(scores / self.cap) * self.cap

    def pull_back(self, gradient: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the head's output from that of the mapped logits, in place."""
        if self.cap is not None:
            gradient.mul_(1 - (scores / self.cap) ** 2)
        return gradient.mul_(self.scale) if self.scale != 1 else gradient


def linear_cross_entropy(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    targets_T: torch.Tensor,
    mapped: LogitMap,
) -> torch.Tensor:
    """Return the summed cross entropy of `hidden_TD @ weight_VD.T + bias_V`, computed by blocks of the vocabulary.

    The vocabulary is split, not the tokens: so each row of the head's gradient is one product, rounded once, as without
    blocks. The gradient of `hidden_TD` sums one product per block, in fp32. The backward pass recomputes the logits, and is
    not differentiable.

    Args:
        hidden_TD: Input of the head. Shape (tokens, width).
        weight_VD: Weight of the head. Shape (vocabulary, width).
        bias_V: Bias of the head, or None.
        targets_T: Class of each token, -100 for tokens outside the loss.
        mapped: Map of the head's output to the logits.

    Returns:
        Scalar in fp32.
    """
    return _LinearCrossEntropy.apply(hidden_TD, weight_VD, bias_V, targets_T, mapped)  # type: ignore[no-any-return, no-untyped-call]


def chunked_cross_entropy(
    head: Any, hidden_TD: torch.Tensor, targets_T: torch.Tensor, mapped: LogitMap, *, vocab_size: int
) -> torch.Tensor:
    """Return the summed cross entropy of any head, computed by chunks of tokens.

    For heads that are more than one linear layer, such as LoRA around one: each chunk is recomputed in the backward pass.

    Args:
        head: Module that returns logits of shape (tokens, vocabulary).
        hidden_TD: Input of the head. Shape (tokens, width).
        targets_T: Class of each token, -100 for tokens outside the loss.
        mapped: Map of the head's output to the logits.
        vocab_size: Number of logits per token, from which the chunk size follows.

    Returns:
        Scalar fp32.
    """
    size = max(1, BLOCK_ELEMENTS // vocab_size)
    total = torch.zeros((), dtype=torch.float32, device=hidden_TD.device)

    def loss(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(mapped.apply(head(hidden)), targets, ignore_index=IGNORED, reduction="sum")

    for hidden, targets in zip(torch.split(hidden_TD, size), torch.split(targets_T, size), strict=True):
        total = total + checkpoint(loss, hidden, targets, use_reentrant=False)
    return total


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_T: torch.Tensor,
        mapped: LogitMap,
    ) -> torch.Tensor:
        counts_T = targets_T != IGNORED
        log_sum_T = torch.full(targets_T.shape, -torch.inf, dtype=torch.float32, device=hidden_TD.device)
        target_score_T = torch.zeros_like(log_sum_T)
        for rows in _blocks(hidden_TD, weight_VD):
            scores_Tv = mapped.apply(_logits(hidden_TD, weight_VD, bias_V, rows))
            inside_T, index_T = _inside(targets_T, rows)
            picked_T = scores_Tv.gather(1, index_T[:, None]).squeeze(1)
            target_score_T += torch.where(inside_T, picked_T, 0)
            log_sum_T = torch.logaddexp(log_sum_T, _log_sum(scores_Tv))
            del scores_Tv
        ctx.save_for_backward(hidden_TD, weight_VD, bias_V, targets_T, log_sum_T)
        ctx.mapped = mapped
        return torch.where(counts_T, log_sum_T - target_score_T, 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        hidden_TD, weight_VD, bias_V, targets_T, log_sum_T = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad_hidden_TD = torch.zeros_like(hidden_TD, dtype=torch.float32) if needs_hidden else None
        grad_weight_VD = torch.empty_like(weight_VD) if needs_weight else None
        grad_bias_V = torch.empty_like(bias_V) if needs_bias else None
        factor_T1 = torch.where(targets_T != IGNORED, gradients[0], 0)[:, None]
        for rows in _blocks(hidden_TD, weight_VD):
            grad_Tv = _block_gradient(ctx.mapped, hidden_TD, weight_VD, bias_V, targets_T, log_sum_T, factor_T1, rows)
            if grad_bias_V is not None:
                grad_bias_V[rows] = grad_Tv.sum(dim=0)
            grad_Tv = grad_Tv.to(hidden_TD.dtype)
            if grad_hidden_TD is not None:
                grad_hidden_TD += grad_Tv @ weight_VD[rows]
            if grad_weight_VD is not None:
                torch.mm(grad_Tv.t(), hidden_TD, out=grad_weight_VD[rows])
            del grad_Tv
        grad_hidden = None if grad_hidden_TD is None else grad_hidden_TD.to(hidden_TD.dtype)
        return grad_hidden, grad_weight_VD, grad_bias_V, None, None


def _log_sum(scores_Tv: torch.Tensor) -> torch.Tensor:
    """Return `scores_Tv.logsumexp(1)` without making a copy; the logits are overwritten."""
    top_T = scores_Tv.amax(dim=1)
    return scores_Tv.sub_(top_T[:, None]).exp_().sum(dim=1).log_().add_(top_T)


def _block_gradient(
    mapped: LogitMap,
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    targets_T: torch.Tensor,
    log_sum_T: torch.Tensor,
    factor_T1: torch.Tensor,
    rows: slice,
) -> torch.Tensor:
    """Return the gradient of the head's output for one block in fp32: (softmax - one-hot target) times the factor."""
    scores_Tv = mapped.apply(_logits(hidden_TD, weight_VD, bias_V, rows))
    keeps_scores = mapped.cap is not None
    shifted_Tv = scores_Tv - log_sum_T[:, None] if keeps_scores else scores_Tv.sub_(log_sum_T[:, None])
    grad_Tv = shifted_Tv.exp_()
    inside_T, index_T = _inside(targets_T, rows)
    grad_Tv.scatter_add_(1, index_T[:, None], -inside_T[:, None].to(torch.float32))
    return mapped.pull_back(grad_Tv.mul_(factor_T1), scores_Tv)


def _logits(hidden_TD: torch.Tensor, weight_VD: torch.Tensor, bias_V: torch.Tensor | None, rows: slice) -> torch.Tensor:
    return functional.linear(hidden_TD, weight_VD[rows], None if bias_V is None else bias_V[rows])


def _inside(targets_T: torch.Tensor, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a mask of the targets in a block, and their index in it; 0 for the others."""
    inside_T = (targets_T >= rows.start) & (targets_T < rows.stop)
    return inside_T, torch.where(inside_T, targets_T - rows.start, 0)


def _blocks(hidden_TD: torch.Tensor, weight_VD: torch.Tensor) -> Iterator[slice]:
    """Yield blocks of the vocabulary with at most `BLOCK_ELEMENTS` logits each, unless that makes them too narrow."""
    num_rows = len(weight_VD)
    size = max(LEAST_ROWS, BLOCK_ELEMENTS // max(1, len(hidden_TD)))
    return (slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size))
