"""A checkpoint opened: the model that it describes, without weights, and its ranks' tensors as whole ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from toolkit.checkpoint.archives import ReadChecks
from toolkit.config.job import ExpertSharding
from toolkit.exporter.adapter import (
    PEFT_PREFIX,
    Weights,
    base_key,
    factor_of,
    is_adapted,
    lora_targets,
    read_adapter_config,
)
from toolkit.exporter.adapter_shards import adapted_shards
from toolkit.exporter.contents import Opened
from toolkit.exporter.engine_files import is_sharded
from toolkit.exporter.model_folder import adapted_model, empty_model
from toolkit.exporter.other_folders import prefix_of
from toolkit.exporter.pipeline_reader import UnitedCheckpoint
from toolkit.exporter.tensor_parallel_reader import JoinedCheckpoint
from toolkit.exporter.zero_reader import StoredTensor, ZeroCheckpoint
from toolkit.introspect import tied_keys
from toolkit.modeling.weights import full_shapes
from toolkit.tensor_parallel.apply import dense_shards
from toolkit.tensor_parallel.layout import Shard
from toolkit.tensor_parallel.tables import tp_plan_for
from toolkit.topology.grid import Grid


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedRanks(Opened):
    """A checkpoint of an engine: what each of its ranks has, and how that makes whole tensors.

    Args:
        tag_dir: Folder of the engine's files.
        ranks: Weights of each model-parallel rank, stage by stage; a single entry where all ranks' files are read as one.
        tp_size: Tensor ranks of a stage.
        shards: Shard of each tensor that tensor ranks share.
        tied: Name of a tied weight to the name of the one whose values it shares.
        prefix: What the names of the ranks' tensors have before those of the model.
    """

    tag_dir: Path
    ranks: Sequence[Weights]
    tp_size: int
    shards: Mapping[str, Shard]
    tied: Mapping[str, str]
    prefix: str = ""

    def united(self, ranks: Sequence[Weights]) -> UnitedCheckpoint:
        """Return whole tensors of what each model-parallel rank has of them: its weights, or states shaped like them."""
        return _united(self.tag_dir, _unwrapped(ranks, self.prefix), self.tp_size, self.shards, self.tied)


def open_checkpoint(
    tag_dir: Path,
    model_dir: Path,
    peft_dir: Path | None = None,
    *,
    trust_remote_code: bool,
    grid: Grid,
    experts: ExpertSharding = "sliced",
    checks: ReadChecks | None = None,
) -> OpenedRanks:
    """Open a tag's files of any strategy.

    Args:
        tag_dir: Folder of the engine's files.
        model_dir: Folder with config.json and the tokenizer.
        peft_dir: Folder with adapter_config.json, for LoRA; `model_dir` when left out.
        trust_remote_code: Whether to run model code in `model_dir`.
        grid: Grid of the run, whose stages and tensor shards are joined. Its replicas are identical.
        experts: How its tensor ranks shared stacked experts.
        checks: As of `ZeroCheckpoint`.

    Raises:
        CheckpointError: EXPORT_CONFIG, EXPORT_REMOTE_CODE, and those of `ZeroCheckpoint`, `ShardedCheckpoint`, `JoinedCheckpoint`,
            `UnitedCheckpoint` and `toolkit.exporter.adapter`.
    """
    is_whole = is_sharded(tag_dir)
    ranks: list[Weights]
    if is_whole:
        from toolkit.exporter.sharded_reader import ShardedCheckpoint

        ranks = [ShardedCheckpoint(tag_dir)]
    else:
        ranks = [ZeroCheckpoint(tag_dir, mp_rank, grid, checks) for mp_rank in range(grid.size("model"))]
    tp_size = 1 if is_whole else grid.tp
    adapted = any(map(is_adapted, ranks))
    names = {name for rank in ranks for name in rank.tensors}
    lora = read_adapter_config(peft_dir or model_dir) if adapted else {}

    def described() -> PreTrainedModel:
        return empty_model(model_dir, trust_remote_code=trust_remote_code, num_tensors=len(names))

    model = described()
    prefix = _peft_prefix(names) if adapted else prefix_of(names, full_shapes(model))
    names = {name.removeprefix(prefix) for name in names}
    peft_model = adapted_model(described(), lora) if adapted else None
    shards = {}
    if tp_size > 1:
        shards = dense_shards(model, tp_plan_for(model, num_ranks=tp_size, experts=experts), num_ranks=tp_size)
        if peft_model is not None:
            shards = adapted_shards(names, shards, lora_targets(peft_model))
    tied = _tied_names(names, model)
    return OpenedRanks(
        tag_dir=tag_dir,
        model_dir=model_dir,
        model=model,
        lora=lora,
        peft_model=peft_model,
        ranks=ranks,
        tp_size=tp_size,
        shards=shards,
        tied=tied,
        prefix=prefix,
        weights=_united(tag_dir, _unwrapped(ranks, prefix), tp_size, shards, tied),
    )


@dataclass(slots=True)
class _Unwrapped:
    """Weights of a model that was an attribute of another module, as it is of Lightning's, under its own names.

    Args:
        weights: Weights under the names of the outer module.
        prefix: What these have before the model's; a name without it stays.
    """

    weights: Weights
    prefix: str
    tensors: dict[str, StoredTensor] = field(init=False)
    _names: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        stored = self.weights.tensors
        self._names = {name.removeprefix(self.prefix): name for name in stored}
        self.tensors = {
            key: replace(stored[name], owner=stored[name].owner.removeprefix(self.prefix))
            for key, name in self._names.items()
        }

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return one whole tensor, in `dtype` if it is a floating-point one."""
        return self.weights.read(self._names[name], dtype)


def _unwrapped(ranks: Sequence[Weights], prefix: str) -> Sequence[Weights]:
    return [_Unwrapped(rank, prefix) for rank in ranks] if prefix else ranks


def _peft_prefix(names: Iterable[str]) -> str:
    """Return what the names of a `PeftModel`'s weights have before peft's own beginning."""
    return next((before for name in sorted(names) for before, found, _ in [name.partition(PEFT_PREFIX)] if found), "")


def _united(
    tag_dir: Path, ranks: Sequence[Weights], tp_size: int, shards: Mapping[str, Shard], tied: Mapping[str, str]
) -> UnitedCheckpoint:
    stages = [
        JoinedCheckpoint(tag_dir, ranks[first : first + tp_size], shards, first)
        for first in range(0, len(ranks), tp_size)
    ]
    held = {name for rank in ranks for name in rank.tensors}
    return UnitedCheckpoint(tag_dir, stages, {name: kept for name, kept in tied.items() if {name, kept} <= held})


def _tied_names(names: Iterable[str], model: PreTrainedModel) -> dict[str, str]:
    """Map names of a checkpoint's tied weights to the names of the weights whose values they share."""
    named = {base_key(name): name for name in names if factor_of(name) is None}
    return {named[key]: named[kept] for key, kept in tied_keys(model).items() if key in named and kept in named}
