"""Splits a causal language model into pipeline stages, and keeps those of one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from toolkit.errors import PlanError
from toolkit.introspect import tied_groups, tied_keys
from toolkit.pipeline_parallel.decoder_layout import DecoderLayout, find_anatomy
from toolkit.pipeline_parallel.part import StageInfo
from toolkit.pipeline_parallel.stage import forward_of_stage
from toolkit.pipeline_parallel.stage_context import PartialModuleList, PlaceholderModule, StageContext
from toolkit.pipeline_schedule import StageSpec
from toolkit.tensor_parallel.guard import guard_part


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSplit:
    """The state of a split model, stored on it as `pipeline_cut`.

    Args:
        info: Stage information, the part of the whole model that it contains.
        passage: Stage context that its placeholder modules share.
        before: Placeholders for the modules before the layers, owned ones included: used by all chunks but the first stage.
        behind: Placeholders for the modules after the layers: used by all chunks but the last stage.
    """

    info: StageInfo
    passage: StageContext
    before: Mapping[str, nn.Module]
    behind: Mapping[str, nn.Module]


def split_model(model: PreTrainedModel, part: StageSpec) -> StageInfo:
    """Remove the layers and modules of other ranks from a model, in place; what remains keeps its name.

    The embedding and everything else called before the layers belong to the first stage, the final norm, the head and
    everything else called after them to the last. Modules without weights, such as rotary tables, stay on every stage. A head
    that is tied to the embedding becomes a separate weight on the last stage. `save_pretrained` and `generate` of a stage are
    refused (PART_SAVE, PART_GENERATE).

    Args:
        model: Model on any device, best on meta, before it has storage; already sharded by `apply_tensor_parallel` if at
            all; without adapters.
        part: Layers of this rank.

    Returns:
        What the model now contains; `stage_info` returns it later.

    Raises:
        PlanError: PIPELINE_LAYERS if its layers are not found, PIPELINE_ARCHITECTURE if anything but hidden states passes
            between them, PIPELINE_SHARED for a weight of two stages. The model is then unchanged.
        ValueError: If the model has another number of layers than `part` says, is split already, or was never tied.
    """
    if hasattr(model, "pipeline_cut"):
        raise ValueError("the model is already split")
    for one, other in tied_keys(model).items():
        if model.get_parameter(one) is not model.get_parameter(other):
            raise ValueError(f"{one} and {other} are tied by the configuration, and not yet by tie_weights")
    anatomy = find_anatomy(model)
    stack: Any = model.get_submodule(anatomy.layers)
    if len(stack) != part.num_layers:
        raise ValueError(f"a model of {len(stack)} layers is split by a StageSpec of {part.num_layers}")
    tied = _tied_ends(model, anatomy)
    pieces = getattr(stack, "sequence_pieces", None)
    passage = StageContext(
        num_layers=part.num_layers, returns=anatomy.returns, features=anatomy.features, pieces=pieces
    )
    own = frozenset(layer for layer in range(part.num_layers) if part.owns(layer))
    model.set_submodule(anatomy.layers, PartialModuleList(stack, own, passage))
    before = {name: PlaceholderModule(passage, model.get_submodule(name)) for name in anatomy.before}
    behind = {name: PlaceholderModule(passage, model.get_submodule(name)) for name in anatomy.behind}
    absent = {**({} if part.first else before), **({} if part.last else behind)}
    for name, stand_in in absent.items():
        model.set_submodule(name, stand_in)
    info = StageInfo(
        part=part,
        layers=anatomy.layers,
        absent=tuple(absent),
        **_part_ends(model, part, tied),
    )
    model.pipeline_cut = PipelineSplit(
        info=info,
        passage=passage,
        before=before,
        behind=behind,
    )
    model.forward = MethodType(forward_of_stage(model.forward.__func__), model)
    if len(own) < part.num_layers:
        guard_part(model, held_part="the layers of its stage of a pipeline")
    return info


def _tied_ends(model: PreTrainedModel, anatomy: DecoderLayout) -> tuple[str, str] | None:
    """Return the keys of the weight that embedding and head share, in this order; None if they share none.

    Raises:
        PlanError: PIPELINE_SHARED for any other weight that two parts share.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied: tuple[str, str] | None = None
    for keys in tied_groups(model):
        weight = model.get_parameter(keys[0])
        parts: dict[str, str] = {}  # each part's first key
        for key in keys:
            parts.setdefault(_part_of(key, anatomy), key)
        if len(parts) == 1:
            continue
        is_tie = parts.keys() == {"before", "behind"} and tied is None
        if not is_tie or not all(_owns(end, weight) for end in (embedding, head)):
            raise PlanError.of(
                code="PIPELINE_SHARED",
                key="parallel.pipeline",
                message=f"{type(model).__name__} has one weight as {' and '.join(parts.values())}, which may be on "
                "different stages: only an embedding and a head can share one over a pipeline",
                fix="Set parallel.pipeline to 1",
            )
        tied = parts["before"], parts["behind"]
    return tied


def _part_of(key: str, anatomy: DecoderLayout) -> str:
    if key.startswith(f"{anatomy.layers}."):
        return key.removeprefix(f"{anatomy.layers}.").partition(".")[0]
    return "before" if any(key.startswith(f"{name}.") for name in anatomy.before) else "behind"


def _owns(module: nn.Module | None, weight: nn.Parameter) -> bool:
    return module is not None and any(own is weight for own in module._parameters.values())


def _part_ends(model: PreTrainedModel, part: StageSpec, tied: tuple[str, str] | None) -> dict[str, Any]:
    """Untie a head from an embedding that is on another rank, and return the fields of `StageInfo` on the tied weight."""
    if tied is None or (part.first and part.last):
        return {"tied_key": None, "tied_copy": {}}
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            # transformers and peft tie these keys again; here one of the two is on another rank.
            module.all_tied_weights_keys, module._tied_weights_keys = {}, {}
    embedding, head = tied
    if part.last:
        return {"tied_key": head, "tied_copy": {head: embedding}}
    return {"tied_key": embedding if part.first else None, "tied_copy": {}}
