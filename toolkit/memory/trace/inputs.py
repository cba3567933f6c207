"""The batches that a model is traced on, as the collator would give them, and the loss that follows.

B: sequences of a micro batch, S: tokens of a sequence.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
)

from toolkit.config.job import Packing
from toolkit.errors import PlanError
from toolkit.modeling.loss import auxiliary_loss, cross_entropy_over, token_loss

Task = Literal[
    "causal-lm", "sequence-classification", "masked-lm", "seq2seq-lm", "image-classification", "image-text-to-text"
]

# Models that take a list of images for each sequence (transformers models/idefics3/modeling_idefics3.py
# get_image_features): shape (sequences, images, channels, height, width). One image a sequence is traced.
SEVERAL_IMAGES = ("idefics2", "idefics3", "smolvlm")

Batch = dict[str, torch.Tensor]


def auto_class(task: Task) -> Any:
    """Return the class of transformers that builds a task's model."""
    return {
        "causal-lm": AutoModelForCausalLM,
        "sequence-classification": AutoModelForSequenceClassification,
        "masked-lm": AutoModelForMaskedLM,
        "seq2seq-lm": AutoModelForSeq2SeqLM,
        "image-classification": AutoModelForImageClassification,
        "image-text-to-text": AutoModelForImageTextToText,
    }[task]


PADDED = (
    "Batches hold a row as long as sequence_length and one that is padded, so that attention has a mask; a batch without "
    "padding needs less"
)


def make_batch(
    task: Task,
    config: PreTrainedConfig,
    *,
    micro_batch: int,
    sequence_length: int,
    packing: Packing,
    flatten: bool,
    dtype: torch.dtype,
) -> tuple[Batch, torch.Tensor]:
    """Makes inputs and labels of the shapes and types of a full batch.

    Args:
        task: What the model does.
        config: Of the model.
        micro_batch: Sequences, or images.
        sequence_length: Tokens of a sequence; of input and of target for seq2seq-lm.
        packing: Which of `attention_mask` and `position_ids` goes with the tokens, as `toolkit.data.collate` has it.
        flatten: Whether `separated` rows are joined end to end.
        dtype: Of images.

    Returns:
        The model's keyword arguments, and the labels.
    """
    shape = (micro_batch, sequence_length)
    if packing == "separated" and flatten:
        shape = (1, micro_batch * sequence_length)
    if task == "image-classification":
        return {"pixel_values": _pixels(config, micro_batch, dtype)}, _tokens((micro_batch,))
    inputs = {"input_ids": _tokens(shape)}
    if packing == "none":
        inputs["attention_mask"] = _tokens(shape)
    elif packing == "separated":
        inputs["position_ids"] = _tokens(shape)
    if task == "sequence-classification":
        return inputs, _tokens((shape[0],))
    if task == "image-text-to-text":
        pixels = _pixels(getattr(config, "vision_config", config), micro_batch, dtype)
        inputs["pixel_values"] = pixels[:, None] if config.model_type in SEVERAL_IMAGES else pixels
    if task == "seq2seq-lm":
        inputs["decoder_input_ids"] = _tokens(shape)  # DataCollatorForSeq2Seq makes them from the labels
    return inputs, _tokens(shape)


def loss_of(
    task: Task,
    outputs: Any,
    labels: torch.Tensor,
    config: PreTrainedConfig,
    *,
    tp_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Return the loss that the engine differentiates: ours for causal language models, else the model's own.

    Args:
        task: What the model does.
        outputs: Of the model.
        labels: As `make_batch` makes them.
        config: Of the model.
        tp_group: Ranks over which the vocabulary lies; None where logits are whole.
    """
    if task != "causal-lm":
        return outputs.loss  # type: ignore[no-any-return]
    vocab_size = config.get_text_config(decoder=True).vocab_size
    loss = token_loss(outputs, labels, cross_entropy=cross_entropy_over(tp_group, vocab_size=vocab_size))
    router = auxiliary_loss(outputs, config)
    return loss if router is None else loss + router


def _tokens(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def _pixels(config: Any, count: int, dtype: torch.dtype) -> torch.Tensor:
    size = getattr(config, "image_size", None)
    if size is None:
        raise PlanError.of(
            code="TRACE_FAILED",
            key="model",
            message=f"the model cannot be traced: images of model_type={config.model_type} have no size of their own "
            "(its configuration has no image_size), and what a batch takes depends on that of each",
            fix="Choose a model whose images have one size",
        )
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return torch.zeros((count, config.num_channels, height, width), dtype=dtype)
