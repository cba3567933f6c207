"""The loss of a task, summed over the labels: cross entropy of next tokens, of tokens or of sequences, or the error of numbers.

B: sequences of a micro batch, S: tokens of a sequence, V: vocabulary, or this rank's part of it, C: classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.nn import functional

from toolkit.config.job import NEXT_TOKEN, Loss, ProblemType, Task, Train
from toolkit.config.user_code import imported
from toolkit.context_parallel.slices import SequenceSlice
from toolkit.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

# Maps logits and labels to the summed loss.
CrossEntropy = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

IGNORED = -100  # label that torch.nn.functional.cross_entropy ignores (its ignore_index)


def count_targets(labels_BS: torch.Tensor) -> torch.Tensor:
    """Return the number of labels that a position predicts, as an int64 scalar on the labels' device."""
    return (labels_BS[:, 1:] != IGNORED).sum()


def counts_in_loss(labels: torch.Tensor) -> torch.Tensor:
    """Return which labels count: integers but -100, numbers but NaN. Shape of the labels."""
    return ~labels.isnan() if labels.is_floating_point() else labels != IGNORED


def summed_label_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    problem_type: ProblemType | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> torch.Tensor:
    """Return the summed loss of labels at their own positions, in fp32.

    Args:
        logits: Scores. Shape (batch, classes), or (batch, sequence, classes) for tokens; any floating dtype.
        labels: Integers, -100 for those outside the loss, shape of the scores without classes; or numbers, NaN for those outside
            the loss, shape (batch,) for one number and (batch, classes) for several.
        problem_type: Loss of numbers: binary cross entropy of `multi_label_classification`, squared error of `regression`.
        label_smoothing: As `summed_cross_entropy` takes it.
        z_loss: The same.

    Returns:
        Scalar in fp32. Divide by the number of labels that count for transformers' mean.

    Source:
        transformers loss/loss_utils.py ForSequenceClassificationLoss, ForTokenClassification, ForMaskedLMLoss.
    """
    if not labels.is_floating_point():
        scores_NC, labels_N = logits.float().reshape(-1, logits.shape[-1]), labels.reshape(-1)
        loss = functional.cross_entropy(
            scores_NC, labels_N, ignore_index=IGNORED, reduction="sum", label_smoothing=label_smoothing
        )
        if z_loss:
            loss = loss + z_loss * (scores_NC.logsumexp(-1).square() * (labels_N != IGNORED)).sum()
        return loss
    scores, counted = logits.float().reshape(labels.shape), counts_in_loss(labels)
    wanted = torch.where(counted, labels.float(), 0.0)
    if problem_type == "multi_label_classification":
        losses = functional.binary_cross_entropy_with_logits(scores, wanted, reduction="none")
    else:
        losses = (scores - wanted).square()
    return torch.where(counted, losses, 0.0).sum()


def summed_cross_entropy(
    logits_BSV: torch.Tensor,
    labels_BS: torch.Tensor,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    part: SequenceSlice | None = None,
) -> torch.Tensor:
    """Return the summed cross entropy of next tokens, in fp32.

    Args:
        logits_BSV: Logits. Shape (batch, sequence, vocabulary), any floating dtype.
        labels_BS: Token ids at their own positions, -100 for tokens outside the loss. Shape (batch, sequence).
        label_smoothing: Factor ε: (1 - ε) times the cross entropy plus ε times its mean over all classes.
        z_loss: Weight of the squared logarithm of the softmax's denominator, which is added.
        part: Slice of the sequence that the logits are of; None for all of it. Labels are those of the whole sequence.

    Returns:
        Scalar in fp32. Divide by `count_targets` for the mean.

    Source:
        transformers loss/loss_utils.py ForCausalLMLoss: the labels are shifted, not the logits, which avoids a copy
        of the largest tensor.
    """
    targets_T = shifted(labels_BS, part).reshape(-1)
    scores_TV = logits_BSV.float().view(-1, logits_BSV.shape[-1])
    loss = functional.cross_entropy(
        scores_TV, targets_T, ignore_index=IGNORED, reduction="sum", label_smoothing=label_smoothing
    )
    if z_loss:
        loss = loss + z_loss * (scores_TV.logsumexp(-1).square() * (targets_T != IGNORED)).sum()
    return loss


def shifted_right(labels_BS: torch.Tensor, config: Any) -> torch.Tensor:
    """Return the inputs of a decoder that predicts labels: each position gets the label before it. Shape (batch, sequence).

    Source:
        transformers models/t5/modeling_t5.py _shift_right.
    """
    padding = getattr(config, "pad_token_id", None) or 0
    start = getattr(config, "decoder_start_token_id", None)
    start = padding if start is None else start
    before_BS = functional.pad(labels_BS[:, :-1], (1, 0), value=start)
    return before_BS.masked_fill(before_BS == IGNORED, padding)


def shifted(labels_BS: torch.Tensor, part: SequenceSlice | None = None) -> torch.Tensor:
    """Return shifted labels: each position gets that of the next one, the last one -100. Shape (batch, sequence), or of a slice of it."""
    targets_BS = functional.pad(labels_BS[:, 1:], (0, 1), value=IGNORED)
    return targets_BS if part is None else part.take(targets_BS, dim=1)


def token_loss(
    outputs: Any, labels_BS: torch.Tensor, *, cross_entropy: CrossEntropy = summed_cross_entropy
) -> torch.Tensor:
    """Return the summed cross entropy of a model's outputs: from its logits, or as the model computed it from the labels.

    Args:
        outputs: Outputs of a model that was called without labels or, after `chunked_loss.apply_loss`, with them.
        labels_BS: Labels as in `summed_cross_entropy`.
        cross_entropy: Loss of logits; that of `cross_entropy_over` if the vocabulary is sharded.
    """
    own = getattr(outputs, "loss", None)
    return own if own is not None else cross_entropy(outputs.logits, labels_BS)


def cross_entropy_over(
    tp_group: dist.ProcessGroup | None,
    *,
    vocab_size: int,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    part: SequenceSlice | None = None,
) -> CrossEntropy:
    """Return the function that computes `summed_cross_entropy` of logits whose vocabulary is sharded over a group.

    Args:
        tp_group: Ranks of the group; None if the logits are whole.
        vocab_size: Vocabulary size of the whole model, without padding.
        label_smoothing: As `summed_cross_entropy` takes it.
        z_loss: The same.
        part: The same; only of logits whose vocabulary is whole.
    """
    if tp_group is None:
        if not label_smoothing and not z_loss and part is None:
            return summed_cross_entropy
        return partial(summed_cross_entropy, label_smoothing=label_smoothing, z_loss=z_loss, part=part)

    def summed(logits_BSV: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        targets_BS = shifted(labels_BS)
        losses_BS = vocab_parallel_cross_entropy(
            logits_BSV,
            targets_BS,
            vocab_size=vocab_size,
            tp_group=tp_group,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
        )
        return losses_BS.sum()

    return summed


def auxiliary_loss(outputs: Any, config: Any) -> torch.Tensor | None:
    """Return the weighted router loss of a mixture-of-experts model that computes one, else None.

    Source:
        arXiv 2101.03961, section 2.2; transformers models/mixtral/modeling_mixtral.py.
    """
    loss = getattr(outputs, "aux_loss", None)
    coefficient = getattr(config, "router_aux_loss_coef", None)
    if not isinstance(loss, torch.Tensor) or not coefficient:
        return None
    return loss.float() * float(coefficient)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoss:
    """The loss of a step, computed from a model's outputs: by the engine, and by the trace of its memory.

    Args:
        kind: Value of `train.loss`; only a model that computes its own loss is given the labels.
        cross_entropy: Loss of logits of an evaluation, as `cross_entropy_over` returns it.
        objective: The same in training, where it differs: with label smoothing, a z-loss, or a function of the user's.
        config: Configuration of the model, with the weight of router losses.
        dp_size: Data-parallel ranks, over which the engine averages gradients.
        task: What the model is trained to do.
    """

    kind: Loss
    cross_entropy: CrossEntropy
    config: Any
    dp_size: int = 1
    objective: CrossEntropy | None = None
    task: Task = "causal-lm"

    @classmethod
    def of(
        cls,
        train: Train,
        *,
        config: Any,
        tp_group: dist.ProcessGroup | None,
        vocab_size: int,
        dp_size: int = 1,
        part: SequenceSlice | None = None,
        task: Task = "causal-lm",
    ) -> Self:
        """Return the loss of a job's training section; `part` is this rank's slice of each sequence, if it has no more."""
        options = {"label_smoothing": train.label_smoothing_factor, "z_loss": train.z_loss}
        made: Callable[..., CrossEntropy] = partial(cross_entropy_over, tp_group, vocab_size=vocab_size, part=part)
        if task not in NEXT_TOKEN:
            kind = getattr(config, "problem_type", None) if task == "sequence-classification" else None
            made = partial(partial, summed_label_loss, problem_type=kind)
        objective: CrossEntropy | None = None
        if train.compute_loss is not None:
            objective = imported("train.compute_loss", train.compute_loss)
        elif any(options.values()):
            objective = made(**options)
        return cls(
            kind=train.loss, cross_entropy=made(), config=config, dp_size=dp_size, objective=objective, task=task
        )

    def inputs(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the model's keyword arguments: without the labels, from which an encoder-decoder's inputs are made where it has none."""
        inputs = {name: value for name, value in batch.items() if name != "labels" or self.kind != "full"}
        if self.task == "seq2seq-lm" and "decoder_input_ids" not in inputs:
            inputs["decoder_input_ids"] = shifted_right(batch.get("labels", batch["input_ids"]), self.config)
        return inputs

    def count(self, labels: torch.Tensor) -> torch.Tensor:
        """Return the number of labels in the loss, as an int64 scalar on their device."""
        return count_targets(labels) if self.task in NEXT_TOKEN else counts_in_loss(labels).sum()

    def summed(self, outputs: Any, labels: torch.Tensor) -> torch.Tensor:
        """Return the cross entropy summed over the unmasked tokens, by which evaluations are compared."""
        return token_loss(outputs, labels, cross_entropy=self.cross_entropy)

    def of_step(
        self, outputs: Any, labels: torch.Tensor, num_targets: torch.Tensor | float, *, share: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss to differentiate, and this rank's part of the mean loss, detached.

        Args:
            outputs: Outputs of the model.
            labels: Labels of the micro-batch.
            num_targets: Number of unmasked tokens of the whole step, over all ranks.
            share: Share of the step that the micro-batch makes up, for router losses.
        """
        loss = token_loss(outputs, labels, cross_entropy=self.objective or self.cross_entropy) / num_targets
        reported = loss.detach()
        router = auxiliary_loss(outputs, self.config)
        if router is not None:
            loss = loss + router * share / self.dp_size
        # The engine averages gradients over the data-parallel ranks; the loss is its part of a global mean.
        return loss * self.dp_size, reported
