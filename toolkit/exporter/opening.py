"""A checkpoint opened: the model that it describes, without weights, and its ranks' tensors as whole ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from toolkit.checkpoint.archives import ReadChecks
from toolkit.exporter.adapter import Weights, base_key, factor_of, is_adapted, lora_targets, read_adapter_config
from toolkit.exporter.adapter_shards import adapted_shards
from toolkit.exporter.contents import Opened
from toolkit.exporter.engine_files import is_sharded
from toolkit.exporter.model_folder import adapted_model, empty_model
from toolkit.exporter.pipeline_reader import UnitedCheckpoint
from toolkit.exporter.tensor_parallel_reader import JoinedCheckpoint
from toolkit.exporter.zero_reader import ZeroCheckpoint
from toolkit.introspect import tied_keys
from toolkit.tensor_parallel.apply import dense_shards
from toolkit.tensor_parallel.layout import Shard
from toolkit.tensor_parallel.tables import tp_plan_for
from toolkit.topology.grid import Grid


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedRanks(Opened):
    """A checkpoint of the toolkit's own: what each of its ranks has, and how that makes whole tensors.

    Args:
        tag_dir: Folder of the engine's files.
        ranks: Weights of each model-parallel rank, stage by stage; a single entry where all ranks' files are read as one.
        tp_size: Tensor ranks of a stage.
        shards: Shard of each tensor that tensor ranks share.
        tied: Name of a tied weight to the name of the one whose values it shares.
    """

    tag_dir: Path
    ranks: Sequence[Weights]
    tp_size: int
    shards: Mapping[str, Shard]
    tied: Mapping[str, str]

    def united(self, ranks: Sequence[Weights]) -> UnitedCheckpoint:
        """Return whole tensors of what each model-parallel rank has of them: its weights, or states shaped like them."""
        return _united(self.tag_dir, ranks, self.tp_size, self.shards, self.tied)


def open_checkpoint(
    tag_dir: Path,
    model_dir: Path,
    peft_dir: Path | None = None,
    *,
    trust_remote_code: bool,
    grid: Grid,
    checks: ReadChecks | None = None,
) -> OpenedRanks:
    """Open a tag's files of any strategy.

    Args:
        tag_dir: Folder of the engine's files.
        model_dir: Folder with config.json and the tokenizer.
        peft_dir: Folder with adapter_config.json, for LoRA; `model_dir` when left out.
        trust_remote_code: Whether to run model code in `model_dir`.
        grid: Grid of the run, whose stages and tensor shards are joined. Its replicas are identical.
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
    peft_model = adapted_model(described(), lora) if adapted else None
    shards = {}
    if tp_size > 1:
        shards = dense_shards(model, tp_plan_for(model), num_ranks=tp_size)
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
        weights=_united(tag_dir, ranks, tp_size, shards, tied),
    )


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
