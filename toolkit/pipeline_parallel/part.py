"""The part of a model that one rank of a pipeline owns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePart:
    """Which decoder layers a rank owns, and whether it owns the modules before and after them.

    Args:
        chunks: Layers of each of the rank's chunks, in the order of the forward pass; one chunk unless the rank has virtual
            stages.
        num_layers: Number of decoder layers of the whole model.

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
        """True if the rank owns the embedding and all other modules before the layers."""
        return self.is_first(0)

    @property
    def last(self) -> bool:
        """True if the rank owns the final norm, the head and all other modules after the layers."""
        return self.is_last(len(self.chunks) - 1)

    def is_first(self, chunk: int) -> bool:
        """Return whether a chunk is the pipeline's first stage."""
        return self.chunks[chunk].start == 0

    def is_last(self, chunk: int) -> bool:
        """Return whether a chunk is the pipeline's last stage."""
        return self.chunks[chunk].stop == self.num_layers

    def holds(self, layer: int) -> bool:
        """Return whether the rank owns a decoder layer."""
        return any(layer in chunk for chunk in self.chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageInfo:
    """What a split model contains of the whole model.

    Args:
        part: Layers of this rank.
        layers: Name of its list of decoder layers.
        absent: Names of the modules outside the layers that other ranks own, replaced here by placeholders without
            parameters.
        tied_key: This rank's key of the weight that embedding and head share: of the embedding on the first stage, of the
            head on the last. Each copy has its own gradient, which must be summed. None on the ranks between, for an untied
            model, and on a rank that has both ends.
        tied_copy: Key of a weight of this rank, mapped to the key of the whole model whose values it has: the head on the
            last stage of a tied model.
    """

    part: StagePart
    layers: str
    absent: tuple[str, ...]
    tied_key: str | None
    tied_copy: Mapping[str, str]


def stage_info(model: Any) -> StageInfo | None:
    """Return the stage information that `split_model` stored on a model; None if the model is whole.

    Args:
        model: A `PreTrainedModel`, a `peft.PeftModel` around one, or an engine around either.
    """
    cut = getattr(inner_model(model), "pipeline_cut", None)
    return None if cut is None else cut.info


def inner_model(model: Any) -> Any:
    """Return the transformers model inside an engine, a `PeftModel` or both."""
    while not isinstance(model, PreTrainedModel):
        model = model.module if hasattr(model, "module") else model.get_base_model()
    return model
