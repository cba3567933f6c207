"""The files of one checkpoint tag by the model-parallel rank that wrote them, which is our tensor rank."""

from __future__ import annotations

import re
from pathlib import Path

from toolkit.errors import CheckpointError, Problem
from toolkit.modeling.safetensors_folder import some

_MODEL = re.compile(r"(?:zero_pp_rank_(?P<dp>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt")


def model_files(folder: Path, *, tp_rank: int) -> list[Path]:
    """Gives the module states of a tensor rank, by data-parallel rank: one file below stage 3."""
    return _of_rank(folder, _MODEL, tp_rank)


def optimizer_files(folder: Path, *, tp_rank: int) -> list[Path]:
    """Gives the optimizer states of a tensor rank, by data-parallel rank."""
    return _of_rank(folder, _OPTIMIZER, tp_rank)


def check_tensor_ranks(folder: Path, *, tp_size: int) -> None:
    """Checks that a tag holds what `tp_size` tensor ranks write, and nothing of others.

    Raises:
        CheckpointError: EXPORT_NO_CHECKPOINT; EXPORT_MODEL_PARALLEL for files of other tensor ranks or of pipeline
            stages; EXPORT_INCOMPLETE where a tensor rank lacks a file that another has.
    """
    found = {path.name: match for path in sorted(folder.glob("*.pt")) if (match := _match(path.name))}
    if not any(_MODEL.fullmatch(name) for name in found):
        raise CheckpointError(_no_checkpoint(folder))
    stages = sorted(path.name for path in folder.glob("layer_*.pt"))
    if stages:
        raise CheckpointError(_of_stages(folder, stages[0]))
    others = [name for name, match in found.items() if int(match["mp"]) >= tp_size]
    if others:
        raise CheckpointError(_of_others(folder, others, tp_size))
    wanted = {_for_rank(match, rank) for match in found.values() for rank in range(tp_size)}
    missing = sorted(wanted - found.keys())
    if missing:
        raise CheckpointError(_incomplete(folder, missing, tp_size))


def _of_rank(folder: Path, pattern: re.Pattern[str], tp_rank: int) -> list[Path]:
    matches = [(pattern.fullmatch(path.name), path) for path in folder.glob("*.pt")]
    ranked = [(int(match["dp"] or 0), path) for match, path in matches if match and int(match["mp"]) == tp_rank]
    return [path for _, path in sorted(ranked)]


def _match(name: str) -> re.Match[str] | None:
    return _MODEL.fullmatch(name) or _OPTIMIZER.fullmatch(name)


def _for_rank(match: re.Match[str], rank: int) -> str:
    """Gives the name that another tensor rank's file of the same kind has."""
    start, stop = match.span("mp")
    return f"{match.string[:start]}{rank:02d}{match.string[stop:]}"


def _no_checkpoint(folder: Path) -> Problem:
    return Problem(
        code="EXPORT_NO_CHECKPOINT",
        key=str(folder),
        message=f"{folder} holds no *_model_states.pt: it is not a folder that the DeepSpeed engine saved",
        fix="Name a checkpoint-STEP folder of output_dir",
    )


def _of_stages(folder: Path, name: str) -> Problem:
    return Problem(
        code="EXPORT_MODEL_PARALLEL",
        key=str(folder),
        message=f"{folder} holds {name}: layers that DeepSpeed's pipeline engine saved one by one cannot be joined",
        fix="Export a checkpoint of a job with pipeline: 1",
        source="deepspeed, runtime/pipe/module.py, PipelineModule.save_state_dict",
    )


def _of_others(folder: Path, names: list[str], tp_size: int) -> Problem:
    ranks = "0" if tp_size == 1 else f"0 to {tp_size - 1}"
    return Problem(
        code="EXPORT_MODEL_PARALLEL",
        key=str(folder),
        message=f"{folder} holds {some(names)}, but a run with tensor={tp_size} has files of model-parallel rank "
        f"{ranks} only",
        fix="Put the plan.json of the run that saved these files beside them: its parallel.tensor says how they join",
        source="deepspeed, runtime/engine.py, DeepSpeedEngine._get_ckpt_name",
    )


def _incomplete(folder: Path, missing: list[str], tp_size: int) -> Problem:
    return Problem(
        code="EXPORT_INCOMPLETE",
        key=str(folder),
        message=f"{folder} lacks {some(missing)}: each of the {tp_size} tensor ranks of its plan writes its own files",
        fix="Copy the files of every node into this folder, or export an earlier checkpoint",
        source="deepspeed, runtime/engine.py, DeepSpeedEngine._get_ckpt_name, _get_rank_zero_ckpt_name",
    )
