"""The part of a model that one rank of a pipeline holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePart:
    """Which decoder layers a rank holds, and whether it holds the ends of the model.

    Args:
        chunks: Layers of each of the rank's chunks, in the order in which a micro-batch meets them; one chunk unless the
            rank has virtual stages.
        num_layers: Decoder layers of the whole model.

    Raises:
        TypeError: If a chunk is not a range.
        ValueError: If a chunk is empty, lies outside the model, or does not come after the one before.
    """

    chunks: tuple[range, ...]
    num_layers: int

    def __post_init__(self) -> None:
        for chunk in self.chunks:
            if not isinstance(chunk, range):
                raise TypeError(f"chunks={self.chunks!r}: each chunk is a range of layers, such as range(0, 2)")
            if not chunk or chunk.step != 1 or chunk.start < 0 or chunk.stop > self.num_layers:
                raise ValueError(f"{chunk} is not a run of the model's {self.num_layers} layers")
        if not self.chunks or any(later.start < earlier.stop for earlier, later in pairwise(self.chunks)):
            raise ValueError(f"chunks {self.chunks} must follow each other")

    @property
    def first(self) -> bool:
        """True if the rank holds the embedding and all else before the layers."""
        return self.is_first(0)

    @property
    def last(self) -> bool:
        """True if the rank holds the final norm, the head and all else behind the layers."""
        return self.is_last(len(self.chunks) - 1)

    def is_first(self, chunk: int) -> bool:
        """Return whether a chunk is the pipeline's first stage."""
        return self.chunks[chunk].start == 0

    def is_last(self, chunk: int) -> bool:
        """Return whether a chunk is the pipeline's last stage."""
        return self.chunks[chunk].stop == self.num_layers

    def holds(self, layer: int) -> bool:
        """Return whether a decoder layer is this rank's."""
        return any(layer in chunk for chunk in self.chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageInfo:
    """What a cut model is of the whole one.

    Args:
        part: Its layers.
        layers: Name of its list of decoder layers.
        absent: Names of the modules outside the layers that other ranks hold; something without parameters stands there.
        tied_key: Key of the weight that embedding and head share, as this rank holds it: of the embedding on the first
            stage, of the head on the last. The two have gradients of their own, which are to be summed. None on the ranks
            between, where nothing is tied, and on a rank that holds both as one.
        tied_copy: Key of a weight of this rank to the key of the whole model whose values it has; the head on the last
            stage of a tied model.
    """

    part: StagePart
    layers: str
    absent: tuple[str, ...]
    tied_key: str | None
    tied_copy: Mapping[str, str]


def stage_info(model: Any) -> StageInfo | None:
    """Return what `split_model` made of a model; None where it is whole.

    Args:
        model: A `PreTrainedModel`, a `peft.PeftModel` around one, or an engine around either.
    """
    cut = getattr(inner_model(model), "pipeline_cut", None)
    return None if cut is None else cut.info


def inner_model(model: Any) -> Any:
    """Return the transformers model inside an engine, adapters or both."""
    while not isinstance(model, PreTrainedModel):
        model = model.module if hasattr(model, "module") else model.get_base_model()
    return model
