"""The decoder layers of each pipeline stage, and the features of a model that no stage can compute by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from toolkit.catalog.models import ModelSpec
from toolkit.catalog.parameters import count_parameters
from toolkit.config.job import Job
from toolkit.pipeline_schedule import partition, uniform_partition


def layers_of_stages(job: Job, model: ModelSpec, *, sequence_length: int, virtual_stages: int) -> tuple[int, ...]:
    """Return the decoder layers of each stage, first to last; empty without a pipeline, or where stages outnumber layers.

    Args:
        job: Job with the number of stages and the way to balance them.
        model: Model whose layers are distributed.
        sequence_length: Tokens per sequence; the share of attention in the cost grows with them.
        virtual_stages: Stages per rank.
    """
    parallel = job.parallel
    stages = parallel.pipeline * virtual_stages
    if parallel.pipeline == 1 or stages > model.num_hidden_layers:
        return ()
    if isinstance(parallel.partition, tuple):
        return parallel.partition
    counted = count_parameters(model.config)
    if parallel.partition == "uniform" or counted is None:
        return uniform_partition(model.num_hidden_layers, stages)
    if parallel.partition == "parameters":
        head = counted.final_norm + (counted.head or model.vocab_size * model.hidden_size)
        return partition([float(count) for count in counted.layers], stages, first=counted.embedding, last=head)
    layers, last = operations(model, sequence_length=sequence_length)
    return partition(layers, stages, last=last)


def operations(model: ModelSpec, *, sequence_length: int) -> tuple[list[float], float]:
    """Return the multiplications per token of each layer, and of the head; equal for all layers where they are unknown."""
    counted = count_parameters(model.config)
    if counted is None:
        return [1.0] * model.num_hidden_layers, 0.0
    # Active weights, and the scores and sums of half a sequence.
    attention = float(sequence_length * model.num_attention_heads * model.head_dim)
    head = float(model.vocab_size * model.hidden_size)
    return [count + attention for count in counted.active_layers], head


def across_stages(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the values of a model's config.json that need more than one stage's layers, each with the reason.

    Args:
        config: Content of config.json; a multimodal one is read through its `text_config`.
    """
    text = config.get("text_config")
    values = text if isinstance(text, Mapping) else config
    if values.get("layerdrop"):
        yield (
            f"layerdrop={values['layerdrop']}",
            "layers are dropped at random, and each stage would draw independently",
        )
    if values.get("output_router_logits"):
        yield (
            "output_router_logits=true",
            "the router's loss multiplies averages over all layers, and no stage has them all",
        )
