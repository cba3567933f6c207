"""The batch on which a model is traced, as the collator would make it, and the loss.

B: sequences of a micro batch, S: tokens of a sequence.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig

from toolkit.config.job import Packing
from toolkit.modeling.loss import auxiliary_loss, cross_entropy_over, token_loss

Batch = dict[str, torch.Tensor]

PADDED = (
    "Batches hold a row as long as sequence_length and one that is padded, so that attention has a mask; a batch without "
    "padding needs less"
)


def make_batch(
    *, micro_batch: int, sequence_length: int, packing: Packing, flatten: bool
) -> tuple[Batch, torch.Tensor]:
    """Make inputs and labels of the shapes and types of a full batch.

    Args:
        micro_batch: Sequences per micro-batch.
        sequence_length: Tokens per sequence.
        packing: Kind of packing, which decides between `attention_mask` and `position_ids` as in `toolkit.data.collate`.
        flatten: Whether `separated` rows are joined end to end.

    Returns:
        The model's keyword arguments, and the labels. Shape (B, S), or (1, B * S) where rows are joined.
    """
    shape = (micro_batch, sequence_length)
    if packing == "separated" and flatten:
        shape = (1, micro_batch * sequence_length)
    inputs = {"input_ids": _tokens(shape)}
    if packing == "none":
        inputs["attention_mask"] = _tokens(shape)
    elif packing == "separated":
        inputs["position_ids"] = _tokens(shape)
    return inputs, _tokens(shape)


def loss_of(
    outputs: Any, labels: torch.Tensor, config: PreTrainedConfig, *, tp_group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Return the loss that the engine differentiates.

    Args:
        outputs: Outputs of the model.
        labels: Labels that `make_batch` returned.
        config: Configuration of the model.
        tp_group: Ranks over which the vocabulary is sharded; None where logits are whole.
    """
    vocab_size = config.get_text_config(decoder=True).vocab_size
    loss = token_loss(outputs, labels, cross_entropy=cross_entropy_over(tp_group, vocab_size=vocab_size))
    router = auxiliary_loss(outputs, config)
    return loss if router is None else loss + router


def _tokens(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)
