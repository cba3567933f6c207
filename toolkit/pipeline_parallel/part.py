"""What a split model contains of the whole model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from toolkit.pipeline_schedule import StageSpec


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

    part: StageSpec
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
