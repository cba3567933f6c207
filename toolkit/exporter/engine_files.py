"""The files of one checkpoint tag by the model-parallel rank that wrote them.

In a grid of stages × tensor ranks, model-parallel rank `stage * tp + tensor rank` has one tensor rank's shard of one stage
(toolkit/distributed/deepspeed_mpu.py). A grid of one rank has everything in the files of rank 0.
"""

from __future__ import annotations

import re
from pathlib import Path

from toolkit.checkpoint.layout import LATEST
from toolkit.errors import CheckpointError, Problem
from toolkit.io import read_plain
from toolkit.modeling.safetensors_folder import some
from toolkit.topology.grid import Grid

_MAX_TAG_BYTES = 1000
_RECORD = "engine.json"  # toolkit.engine.sharded_files.ENGINE_FILE, whose module imports DTensor
_MODEL = re.compile(r"(?:zero_pp_rank_(?P<dp>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt")


def read_tag(folder: Path, name: str = LATEST) -> str:
    """Return the tag that a file of a checkpoint names.

    Args:
        folder: Folder of the checkpoint.
        name: Name of the file.

    Raises:
        OSError, ValueError: The file cannot be read, or names no folder beside it.
    """
    tag = read_plain(folder, name, max_bytes=_MAX_TAG_BYTES).decode("utf-8").strip()
    if not tag.isprintable() or Path(tag).name != tag:
        raise ValueError(f"{tag!r:.80} is not a tag")
    return tag


def is_sharded(tag_dir: Path) -> bool:
    """Return whether a tag's folder has the files of DDP or FSDP2, not DeepSpeed's."""
    return (tag_dir / _RECORD).exists()


def is_engine_tag(folder: Path) -> bool:
    """Return whether a folder has files of DeepSpeed's engine."""
    return any(_match(path.name) for path in folder.glob("*_states.pt"))


def model_files(folder: Path, *, mp_rank: int) -> list[Path]:
    """Return the module states of a model-parallel rank, by data-parallel rank: one file below stage 3 of ZeRO."""
    return _of_rank(folder, _MODEL, mp_rank)


def optimizer_files(folder: Path, *, mp_rank: int) -> list[Path]:
    """Return the optimizer states of a model-parallel rank, by data-parallel rank."""
    return _of_rank(folder, _OPTIMIZER, mp_rank)


def check_model_ranks(folder: Path, grid: Grid) -> None:
    """Check that a tag has the files of every model-parallel rank, and of no others.

    Args:
        folder: Folder of the tag.
        grid: Grid of the run, for its stages and tensor ranks.

    Raises:
        CheckpointError: EXPORT_NO_CHECKPOINT; EXPORT_MODEL_PARALLEL for files of other model-parallel ranks, or of DeepSpeed's
            own pipelines; EXPORT_INCOMPLETE if a rank lacks a file that another has.
    """
    num_ranks = grid.size("model")
    found = {path.name: match for path in sorted(folder.glob("*.pt")) if (match := _match(path.name))}
    if not any(_MODEL.fullmatch(name) for name in found):
        raise CheckpointError(_no_checkpoint(folder))
    layers = sorted(path.name for path in folder.glob("layer_*.pt"))
    if layers:
        raise CheckpointError(_of_layers(folder, layers[0]))
    others = [name for name, match in found.items() if int(match["mp"]) >= num_ranks]
    if others:
        raise CheckpointError(_of_others(folder, others, grid))
    wanted = {_for_rank(match, rank) for match in found.values() for rank in range(num_ranks)}
    missing = sorted(wanted - found.keys())
    if missing:
        raise CheckpointError(_incomplete(folder, missing, grid))


def _of_rank(folder: Path, pattern: re.Pattern[str], mp_rank: int) -> list[Path]:
    matches = [(pattern.fullmatch(path.name), path) for path in folder.glob("*.pt")]
    ranked = [(int(match["dp"] or 0), path) for match, path in matches if match and int(match["mp"]) == mp_rank]
    return [path for _, path in sorted(ranked)]


def _match(name: str) -> re.Match[str] | None:
    return _MODEL.fullmatch(name) or _OPTIMIZER.fullmatch(name)


def _for_rank(match: re.Match[str], rank: int) -> str:
    """Return the name of the same kind of file of another model-parallel rank."""
    start, stop = match.span("mp")
    return f"{match.string[:start]}{rank:02d}{match.string[stop:]}"


def _no_checkpoint(folder: Path) -> Problem:
    return Problem(
        code="EXPORT_NO_CHECKPOINT",
        key=str(folder),
        message=f"{folder} has no *_model_states.pt: it was not saved by the DeepSpeed engine",
        fix="Name a checkpoint-STEP folder of output_dir",
    )


def _of_layers(folder: Path, name: str) -> Problem:
    return Problem(
        code="EXPORT_MODEL_PARALLEL",
        key=str(folder),
        message=f"{folder} has {name}: layer files of DeepSpeed's pipeline engine cannot be joined",
        fix="Export a checkpoint of `toolkit train`, whose stages are saved by their ranks",
        source="deepspeed, runtime/pipe/module.py, PipelineModule.save_state_dict",
    )


def _of_others(folder: Path, names: list[str], grid: Grid) -> Problem:
    last = grid.size("model") - 1
    return Problem(
        code="EXPORT_MODEL_PARALLEL",
        key=str(folder),
        message=f"{folder} has {some(names)}, but a run with {_written(grid)} has files of model-parallel rank "
        f"{f'0 to {last}' if last else '0'} only",
        fix="Put the plan.json of the run that saved these files next to them: its parallel.pipeline and "
        "parallel.tensor determine how they are joined",
        source="deepspeed, runtime/engine.py, DeepSpeedEngine._get_ckpt_name",
    )


def _incomplete(folder: Path, missing: list[str], grid: Grid) -> Problem:
    return Problem(
        code="EXPORT_INCOMPLETE",
        key=str(folder),
        message=f"{folder} lacks {some(missing)}: by its plan, with {_written(grid)}, each model-parallel rank from 0 to "
        f"{grid.size('model') - 1} writes its own files",
        fix="Copy the files of every node into this folder, or export an earlier checkpoint",
        source="deepspeed, runtime/engine.py, DeepSpeedEngine._get_ckpt_name, _get_rank_zero_ckpt_name",
    )


def _written(grid: Grid) -> str:
    return f"pipeline={grid.pp} and tensor={grid.tp}"
