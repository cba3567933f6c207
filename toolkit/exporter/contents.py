"""The tensors of an export, their keys and dtypes; checks that a checkpoint has all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from toolkit.errors import CheckpointError, Problem, raise_all
from toolkit.exporter.adapter import MergedWeights, Weights, adapter_names, lora_targets
from toolkit.exporter.base_weights import PretrainedWeights
from toolkit.exporter.zero_reader import StoredTensor
from toolkit.introspect import tied_keys
from toolkit.modeling.conversion import group_model_keys
from toolkit.modeling.nf4 import packed_linears
from toolkit.modeling.safetensors_folder import some
from toolkit.modeling.weights import full_shapes

Kind = Literal["model", "adapter", "merged"]
_OF_THIS_JOB = "Put this job's config.json into the checkpoint's `model` folder"


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A checkpoint with its weights located, and the model on the meta device; the last two for LoRA only."""

    weights: Weights
    model: PreTrainedModel
    model_dir: Path
    lora: Mapping[str, Any]
    peft_model: nn.Module | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The tensors to write: groups of model keys (or adapter names) that are read and converted together.

    Args:
        kind: Full model, adapter alone, or adapter merged into its base.
        weights: Weights to read from.
        sources: Key to name in the weights and dtype to write.
        groups: Keys that are converted together.
        dtype_name: Dtype of the token embedding, or of the adapter's first matrix.
        untied: Keys that the config ties, but training made differ.
        adapter_config: Configuration of an adapter exported alone.
    """

    kind: Kind
    weights: Weights
    sources: Mapping[str, tuple[str, torch.dtype]]
    groups: tuple[tuple[str, ...], ...]
    dtype_name: str
    untied: tuple[str, ...] = ()
    adapter_config: Mapping[str, Any] | None = None

    def meta(self, key: str) -> Tensor:
        """Return a tensor of the shape and dtype to write, without values."""
        name, dtype = self.sources[key]
        return torch.empty(self.weights.tensors[name].shape, dtype=dtype, device="meta")

    def read(self, key: str) -> Tensor:
        """Read a tensor in the dtype to write."""
        return self.weights.read(*self.sources[key])


def choose_contents(
    opened: Opened, dtype: torch.dtype | None, *, base_dir: Path | None, merge_adapter: bool, packed: bool = False
) -> Contents:
    """Choose the contents of an export: the model, the adapter, or the base with the adapter merged into it.

    Raises:
        CheckpointError: EXPORT_KEYS, EXPORT_SHAPE, and those of `toolkit.exporter.adapter`.
    """
    weights, model = opened.weights, opened.model
    if opened.peft_model is None:
        return _plan_model(weights, model, dtype, kind="model")
    if not merge_adapter:
        return _plan_adapter(weights, opened.lora, dtype)
    base = None
    if base_dir is not None:
        rounded = frozenset(f"{name}.weight" for name in packed_linears(model)) if packed else frozenset()
        base = PretrainedWeights(base_dir, model, _trained_dtype(weights), rounded)
    return _plan_model(MergedWeights(weights, lora_targets(opened.peft_model), base), model, dtype, kind="merged")


def _plan_model(weights: Weights, model: PreTrainedModel, dtype: torch.dtype | None, *, kind: Kind) -> Contents:
    wanted = full_shapes(model)
    raise_all(CheckpointError, _disagreements(weights, wanted))
    stored = weights.tensors
    tied = tied_keys(model)
    untied = tuple(key for key, owner in tied.items() if stored[key].owner != stored[owner].owner)
    left_out = {*tied.keys() - set(untied), *(model._keys_to_ignore_on_save or ())}
    keys = [key for key in wanted if key not in left_out]
    sources = {key: (key, _written_dtype(stored[key], dtype)) for key in keys}
    embedding = next(iter(sources.values()))[1]
    metas = {key: torch.empty(stored[key].shape, dtype=sources[key][1], device="meta") for key in keys}
    return Contents(
        kind=kind,
        weights=weights,
        sources=sources,
        groups=group_model_keys(model, metas),
        dtype_name=str(embedding).removeprefix("torch."),
        untied=untied,
    )


def _plan_adapter(weights: Weights, config: Mapping[str, Any], dtype: torch.dtype | None) -> Contents:
    names = adapter_names(weights.tensors)
    sources = {key: (name, _written_dtype(weights.tensors[name], dtype)) for key, name in names.items()}
    return Contents(
        kind="adapter",
        weights=weights,
        sources=sources,
        groups=tuple((key,) for key in sources),
        dtype_name=str(next(iter(sources.values()))[1]).removeprefix("torch."),
        adapter_config={**config, "inference_mode": True},
    )


def _disagreements(weights: Weights, wanted: Mapping[str, Tensor]) -> Iterable[Problem]:
    stored = weights.tensors
    for message, keys in (
        ("the checkpoint lacks", sorted(wanted.keys() - stored.keys())),
        ("the model does not have", sorted(stored.keys() - wanted.keys())),
    ):
        if keys:
            yield Problem(
                code="EXPORT_KEYS",
                key=keys[0],
                message=f"{message} {len(keys)} tensor{'s' * (len(keys) > 1)}: {some(keys)}",
                fix=_OF_THIS_JOB,
            )
    for key in wanted.keys() & stored.keys():
        if tuple(wanted[key].shape) != stored[key].shape:
            yield Problem(
                code="EXPORT_SHAPE",
                key=key,
                message=f"{key} has shape {stored[key].shape} in the checkpoint and {tuple(wanted[key].shape)} by the config",
                fix=_OF_THIS_JOB,
            )


def _trained_dtype(weights: Weights) -> torch.dtype:
    """Return the training dtype: that of the first adapter matrix."""
    return next(stored.dtype for name, stored in weights.tensors.items() if ".lora_" in name)


def _written_dtype(stored: StoredTensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and stored.dtype.is_floating_point else stored.dtype
