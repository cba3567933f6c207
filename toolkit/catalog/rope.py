"""Rotary embeddings stretched to longer sequences than a model was pretrained on, written into its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.catalog.architectures import rotary_layout, runs_own_code
from toolkit.config.job import Model, RopeScaling
from toolkit.errors import SpecError

_KEY = "model.rope_scaling"


def with_rope_scaling(config: Mapping[str, Any], model: Model) -> dict[str, Any]:
    """Return the content of a config.json with the scaling that a job's `model` section asks for.

    Raises:
        SpecError: MODEL_ROPE, if the model has no rotary embeddings, or already scales them.
    """
    scaling = model.rope_scaling
    if scaling is None:
        return dict(config)
    known = config.get("rope_parameters") or config.get("rope_scaling") or {}
    before = known.get("rope_type", known.get("type", "default")) if isinstance(known, Mapping) else "default"
    layout = rotary_layout(config)
    own_code = runs_own_code(config, trust_remote_code=model.trust_remote_code)
    if own_code or config.get("alibi") or layout == "none":
        why = "its own code builds it" if own_code else f"{config.get('model_type')} has no rotary embeddings to scale"
        raise _refused(model, why, "Remove it, or name a model with rotary embeddings of transformers' own")
    if layout == "nested" or any(isinstance(value, Mapping) for value in dict(known).values()):
        why = f"{config.get('model_type')} has other rotary embeddings in each kind of layer"
        raise _refused(model, why, "Remove it, or set rope_parameters in the model's config.json")
    if layout == "own":
        raise _refused(model, f"{config.get('model_type')} scales in its own way alone", "Remove it")
    if before != "default":
        factor = f", factor {known['factor']:g}" if isinstance(known.get("factor"), int | float) else ""
        why = f"its embeddings are scaled already ({before}{factor}), and its weights were trained so"
        raise _refused(model, why, "Remove it, or change rope_parameters in the model's config.json")
    limit = config.get("max_position_embeddings")
    if not isinstance(limit, int):
        raise _refused(model, "its config.json has no max_position_embeddings", "Remove it, or add the length there")
    made = {key: value for key, value in config.items() if key != "rope_scaling"}
    made["rope_parameters"] = {**known, **rope_parameters(scaling, limit)}
    made["rope_parameters"].pop("type", None)
    if scaling.type == "yarn":
        made["max_position_embeddings"] = longest(scaling, limit)
    return made


def rope_parameters(scaling: RopeScaling, limit: int) -> dict[str, Any]:
    """Return the keys that transformers reads beside those of the unscaled embeddings.

    Args:
        scaling: The job's section.
        limit: Longest sequence that the model was pretrained on, tokens.
    Source:
        transformers modeling_rope_utils.py RotaryEmbeddingConfigMixin.validate_rope: YaRN compares max_position_embeddings
        with factor × original_max_position_embeddings; the other two leave max_position_embeddings as it is.
    """
    found: dict[str, Any] = {"rope_type": scaling.type, "factor": float(scaling.factor)}
    if scaling.type == "yarn":
        found["original_max_position_embeddings"] = limit
    return found


def longest(scaling: RopeScaling, limit: int) -> int:
    """Return the longest sequence with scaled embeddings, tokens."""
    return int(limit * scaling.factor)


def _refused(model: Model, why: str, fix: str) -> SpecError:
    assert model.rope_scaling is not None
    return SpecError.of(
        code="MODEL_ROPE",
        key=_KEY,
        message=f"rope_scaling={model.rope_scaling.type} with model={model.name}: {why}",
        fix=fix,
        source="transformers modeling_rope_utils.py",
    )
