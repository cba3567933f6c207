"""The forward pass of a chunk of a split model, and the shape and dtype of what a stage receives.

B: sequences of a micro-batch, S: tokens of a sequence, or of this rank's shard of it, D: width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from toolkit.errors import PlanError
from toolkit.pipeline_parallel.decoder_layout import base_of, width_of
from toolkit.pipeline_parallel.part import StageInfo, inner_model, stage_info
from toolkit.pipeline_parallel.stage_context import replaced
from toolkit.tensor_parallel.sequence import check_length


def forward_stage(model: Any, batch: Mapping[str, Any], *, chunk: int = 0, received: torch.Tensor | None = None) -> Any:
    """Run the forward pass of one chunk on a micro-batch.

    Args:
        model: Model after `split_model`, with or without adapters, or the engine around it.
        batch: Whole micro-batch, the same on every stage: `input_ids`, and `attention_mask`, `position_ids` as the model
            takes them; `labels`, which are passed only to the last stage.
        chunk: Index of the chunk on this rank.
        received: Output of the previous stage, of `hidden_shape` and `hidden_dtype`; None for the first stage. If autograd
            is on, it is made to require a gradient: its `grad` is sent back.

    Returns:
        The model's output on the last stage; on others the hidden states to send. Shape (batch, sequence, width).

    Raises:
        PlanError: PIPELINE_OUTPUT_MISMATCH if the output of a stage is not what the next one expects.
        ValueError: If the first stage receives something, or another one nothing or a tensor that is not a leaf.
    """
    part = _info(model).part
    if (received is None) != part.is_first(chunk):
        raise ValueError(
            f"chunk {chunk} is {'' if part.is_first(chunk) else 'not '}the first stage: received={received is not None}"
        )
    if received is not None and torch.is_grad_enabled():
        if not received.is_leaf:
            raise ValueError("what is received must be a leaf, so that its gradient can be sent back")
        received.requires_grad_()
    given = batch if part.is_last(chunk) else {name: value for name, value in batch.items() if name != "labels"}
    return model(chunk=chunk, received=received, **given)


def hidden_shape(model: Any, batch: Mapping[str, Any]) -> torch.Size:
    """Return the shape of the hidden states that stages send each other for a micro-batch: (batch, sequence, width).

    With sequence parallelism the sequence is this rank's shard; some models have several streams of a width.

    Raises:
        PlanError: TP_SEQUENCE if the sequence cannot be divided into equal shards.
    """
    inner = inner_model(model)
    rows, tokens = batch["input_ids"].shape
    passage = inner.pipeline_cut.passage
    if passage.pieces is not None:
        check_length(tokens, passage.pieces.tp_group.size())
        tokens //= passage.pieces.tp_group.size()
    return torch.Size((rows, tokens, *passage.features))


def hidden_dtype(model: Any) -> torch.dtype:
    """Return the dtype of the hidden states that stages send each other: that of the layers' weights."""
    layers: nn.Module = inner_model(model).get_submodule(_info(model).layers)
    return next(weight.dtype for weight in layers.parameters() if weight.is_floating_point())


def forward_of_stage(whole: Callable[..., Any]) -> Callable[..., Any]:
    """Return a model's forward pass extended by `chunk` and `received`: given a chunk, it runs that one alone.

    Args:
        whole: Forward pass of the whole model, unbound.
    """

    def forward(
        self: PreTrainedModel,
        *args: Any,
        chunk: int | None = None,
        received: torch.Tensor | None = None,
        **inputs: Any,
    ) -> Any:
        if chunk is None:
            return whole(self, *args, **inputs)
        return _run(self, whole, chunk, received, {name: value for name, value in inputs.items() if value is not None})

    return forward


def _run(
    model: Any, whole: Callable[..., Any], chunk: int, received: torch.Tensor | None, inputs: dict[str, Any]
) -> Any:
    cut, dtype = model.pipeline_cut, hidden_dtype(model)
    part = cut.info.part
    swapped = {**({} if part.is_first(chunk) else cut.before), **({} if part.is_last(chunk) else cut.behind)}
    ids = inputs["input_ids"]
    # Expanded from one element: it has the shape that masks are derived from, and takes no memory.
    blank_BSD = torch.zeros((), dtype=dtype, device=ids.device).expand(*ids.shape, width_of(model))
    inputs["use_cache"] = False
    through = cut.passage.through(part.chunks[chunk], blank_BSD=blank_BSD, received=received, training=model.training)
    with replaced(model, swapped), through as call:
        outputs = whole(model, **inputs) if part.is_last(chunk) else base_of(model)(**inputs)
    if received is not None and not call.entered:
        raise RuntimeError(f"{type(model).__name__} has not called the layers before chunk {chunk}")
    if part.is_last(chunk):
        return outputs
    wanted = hidden_shape(model, inputs)
    if call.taken is None or call.taken.shape != wanted or call.taken.dtype != dtype:
        raise _unexpected(model, call.taken, wanted, dtype)
    return call.taken


def _unexpected(model: Any, taken: torch.Tensor | None, wanted: torch.Size, dtype: torch.dtype) -> PlanError:
    found = "nothing" if taken is None else f"{tuple(taken.shape)} in {taken.dtype}"
    return PlanError.of(
        code="PIPELINE_OUTPUT_MISMATCH",
        key="parallel.pipeline",
        message=f"a stage of {type(model).__name__} returns {found}, where the next expects {tuple(wanted)} in "
        f"{dtype}, the dtype of its layers' weights",
        fix="Set parallel.pipeline to 1",
    )


def _info(model: Any) -> StageInfo:
    info = stage_info(model)
    if info is None:
        raise ValueError("the model is not split for a pipeline")
    return info
