"""Cross entropy of logits whose vocabulary is sharded over a tensor group; the logits are never gathered.

T: tokens, V: vocabulary, v: the part of it on this rank.

Source:
    arXiv 1909.08053, section 3; label smoothing: arXiv 1512.00567, section 7; z-loss: arXiv 2204.02311, section 5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from toolkit.distributed.collectives import all_reduce
from toolkit.tensor_parallel.embedding import own_rows

IGNORED = -100  # torch.nn.functional.cross_entropy, ignore_index
# Elements of the logits that exist in fp32 at a time: 128 MiB, and twice that while they are summed.
CHUNK_ELEMENTS = 2**25


def vocab_parallel_cross_entropy(
    scores: torch.Tensor,
    targets: torch.Tensor,
    *,
    vocab_size: int,
    tp_group: dist.ProcessGroup,
    ignore_index: int = IGNORED,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> torch.Tensor:
    """Return each token's loss: (1 − ε)·(L − z_target) + ε·(L − mean z) + ζ·L², with L = log Σ exp z.

    Args:
        scores: This rank's logits z. Shape (…, padded vocabulary / tp), any floating dtype.
        targets: Class of each token, the same on all ranks. Shape (…).
        vocab_size: Number of classes, without padding.
        tp_group: Ranks over which the vocabulary is sharded, by `vocabulary_layout`.
        ignore_index: Target of tokens whose loss and gradient are zero.
        label_smoothing: Factor ε, as in `torch.nn.functional.cross_entropy`.
        z_loss: Weight ζ of the z-loss.

    Returns:
        Losses in fp32, the same on all ranks. Shape (…).

    Collectives:
        forward: two all-reduces, of 4 and 12 bytes per token; backward: none.
    """
    settings = _Settings(
        rows=own_rows(vocab_size, tp_group),
        vocab_size=vocab_size,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
    )
    losses_T = _CrossEntropy.apply(scores.flatten(0, -2), targets.flatten(), settings, tp_group)  # type: ignore[no-untyped-call]
    return losses_T.view(targets.shape)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabParallelCausalLoss:
    """Loss function of a causal model of transformers (`model.loss_function`), on logits that stay sharded.

    Source:
        transformers loss/loss_utils.py ForCausalLMLoss, fixed_cross_entropy.
    """

    tp_group: dist.ProcessGroup

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = IGNORED,
        shift_labels: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Return the mean loss of the tokens that are not ignored, or their sum divided by `num_items_in_batch`."""
        if shift_labels is None:
            shift_labels = functional.pad(labels[..., 1:], (0, 1), value=ignore_index)
        losses = vocab_parallel_cross_entropy(
            logits, shift_labels, vocab_size=vocab_size, tp_group=self.tp_group, ignore_index=ignore_index
        )
        count = (shift_labels != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
        return losses.sum() / count


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    rows: range
    vocab_size: int
    ignore_index: int
    label_smoothing: float
    z_loss: float

    def chunks(self, scores_Tv: torch.Tensor, *per_token: torch.Tensor) -> Any:
        """Split logits without their padding, and the tensors of one value per token, into chunks of `CHUNK_ELEMENTS`."""
        size = max(1, CHUNK_ELEMENTS // max(1, len(self.rows)))
        tensors = (scores_Tv[:, : len(self.rows)], *per_token)
        return zip(*(torch.split(tensor, size) for tensor in tensors), strict=True)

    def place(self, targets_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a mask of the targets in this rank's part of the vocabulary, and their index in it; 0 for the others."""
        here_T = (targets_T >= self.rows.start) & (targets_T < self.rows.stop) & (targets_T != self.ignore_index)
        return here_T, torch.where(here_T, targets_T - self.rows.start, 0)


class _CrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any, scores_Tv: torch.Tensor, targets_T: torch.Tensor, settings: _Settings, group: dist.ProcessGroup
    ) -> torch.Tensor:
        own = [_statistics(scores, targets, settings) for scores, targets in settings.chunks(scores_Tv, targets_T)]
        log_sum_T, target_score_T, score_sum_T = (torch.cat(parts) for parts in zip(*own, strict=True))
        top_T = all_reduce(log_sum_T, group=group, op="max")
        sums_3T = torch.stack([(log_sum_T - top_T).exp_(), target_score_T, score_sum_T])
        exp_sum_T, target_score_T, score_sum_T = all_reduce(sums_3T, group=group)
        log_sum_T = exp_sum_T.log().add_(top_T)
        ctx.save_for_backward(scores_Tv, targets_T, log_sum_T)
        ctx.settings = settings
        smoothing = settings.label_smoothing
        loss_T: torch.Tensor = (
            log_sum_T - (1 - smoothing) * target_score_T - smoothing / settings.vocab_size * score_sum_T
        )
        loss_T += settings.z_loss * log_sum_T**2
        return loss_T.masked_fill_(targets_T == settings.ignore_index, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Compute d loss / d z = p·(1 + 2ζL) − (1 − ε)·[target] − ε / V, with p = exp(z − L)."""
        scores_Tv, targets_T, log_sum_T = ctx.saved_tensors
        settings: _Settings = ctx.settings
        factor_T = grads[0].masked_fill(targets_T == settings.ignore_index, 0)
        grad_Tv = torch.empty_like(scores_Tv)
        grad_Tv[:, len(settings.rows) :].zero_()
        chunks = settings.chunks(scores_Tv, grad_Tv[:, : len(settings.rows)], targets_T, log_sum_T, factor_T)
        for scores, out, targets, log_sum, factor in chunks:
            here, place = settings.place(targets)
            grad = torch.sub(scores, log_sum[:, None]).exp_()  # in fp32, like the sums
            if settings.z_loss:
                grad.mul_((1 + 2 * settings.z_loss * log_sum)[:, None])
            if settings.rows:
                share = here.to(grad.dtype).mul_(settings.label_smoothing - 1)
                grad.scatter_add_(1, place[:, None], share[:, None])
            if settings.label_smoothing:
                grad.sub_(settings.label_smoothing / settings.vocab_size)
            torch.mul(grad, factor[:, None], out=out)
        return grad_Tv, None, None, None


def _statistics(
    scores_Tv: torch.Tensor, targets_T: torch.Tensor, settings: _Settings
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log Σ exp z, z_target (0 where another rank has it) and, with smoothing, Σ z of this rank's classes, in fp32.

    Each logit is read from memory as few times as possible, and written once: `logsumexp` of a copy in fp32 would move
    half as much data again.
    """
    nothing_T = torch.zeros_like(targets_T, dtype=torch.float32)
    if not settings.rows:
        return nothing_T - torch.inf, nothing_T, nothing_T
    here_T, place_T = settings.place(targets_T)
    target_score_T = scores_Tv.gather(1, place_T[:, None]).squeeze(1).float().masked_fill_(~here_T, 0)
    top_T = scores_Tv.amax(1).float()
    top_T.masked_fill_(top_T.isinf(), 0)  # as logsumexp does: ∞ − ∞ is NaN
    log_sum_T = torch.sub(scores_Tv, top_T[:, None]).exp_().sum(1).log_().add_(top_T)
    score_sum_T = scores_Tv.sum(1, dtype=torch.float32) if settings.label_smoothing else nothing_T
    return log_sum_T, target_score_T, score_sum_T
