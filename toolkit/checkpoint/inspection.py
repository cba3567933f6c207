"""What a checkpoint is and what can load it, from its small files alone; whether it is whole, in seconds; which ones a run still needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from toolkit.checkpoint.best import best_step
from toolkit.checkpoint.compatibility import inexact
from toolkit.checkpoint.discovery import list_checkpoints
from toolkit.checkpoint.layout import MODEL, PROBE, RANDOM, checkpoint_name, tag_of
from toolkit.checkpoint.manifest import (
    Entry,
    checksum_problems,
    index_problems,
    is_shard,
    read_manifest,
    size_problems,
)
from toolkit.checkpoint.state import SavedAxes, State, saved_plan, step_problems
from toolkit.errors import CheckpointError, raise_all

# Kinds of files in a checkpoint, by what their names below the folder begin with.
_KINDS = {"engine": "global_step", "random": f"{RANDOM}/", "model": f"{MODEL}/", "probe": PROBE}


def inspect(folder: Path) -> dict[str, Any]:
    """Describe a checkpoint, whose keys `toolkit checkpoint inspect` documents.

    Raises:
        CheckpointError: Those of `read_manifest` and `saved_plan`; CHECKPOINT_DAMAGED.
    """
    manifest, state, plan = read_manifest(folder), State.load(folder), saved_plan(folder)
    settings, parallel, train = plan.settings, plan.job.parallel, plan.job.train
    grid = plan.grid
    return {
        "checkpoint": str(folder),
        "format": "toolkit",
        "tag": tag_of(state.step),
        "step": state.step,
        "num_steps": state.num_steps,
        "saved": datetime.fromtimestamp(state.saved_at).isoformat(timespec="seconds"),
        "model": plan.model.name,
        "parameters": plan.model.num_parameters,
        "strategy": parallel.strategy,
        "zero_stage": state.zero_stage if parallel.strategy == "zero" else None,
        "world_size": state.world_size,
        "pipeline": grid.pp,
        "data": grid.dp,
        "tensor": grid.tp,
        "sequence_parallel": settings.sequence_parallel,
        "experts": settings.experts if grid.tp > 1 and plan.model.num_experts else None,
        "virtual_stages": settings.virtual_stages,
        "offload": parallel.offload,
        "method": train.method,
        "precision": settings.precision,
        "optimizer": train.optimizer,
        "bytes": sum(entry.num_bytes for entry in manifest.values()),
        "bytes_by_kind": _sizes(manifest),
        "versions": state.versions,
        "has_optimizer": not train.save_only_model,
        "loads": list(_loads(folder, plan, state)),
    }


def _sizes(manifest: dict[str, Entry]) -> dict[str, int]:
    found = dict.fromkeys((*_KINDS, "other"), 0)
    for name, entry in manifest.items():
        found[next((kind for kind, start in _KINDS.items() if name.startswith(start)), "other")] += entry.num_bytes
    return found


def _loads(folder: Path, plan: Any, state: State) -> Iterator[str]:
    """Yield what can load a checkpoint."""
    train = plan.job.train
    if train.save_only_model:
        yield "no resume: it has no optimizer state"
    else:
        where = ", with this layout" if inexact(plan) else ", on any ranks and with any strategy"
        yield f"`toolkit train JOB --resume_from_checkpoint {folder}`{where}"
    yield f"`toolkit export {folder}`, whose folder transformers{'' if train.method == 'full' else ' and peft'} load"
    if any((folder / tag_of(state.step)).glob("*.safetensors")):
        yield "torch's distributed checkpoint, as safetensors (HuggingFaceStorageReader)"
    elif plan.grid.size("model") == 1 and not train.save_only_model:
        yield f"DeepSpeed's load_checkpoint, on {state.world_size} rank(s) with stage {state.zero_stage}"


def verify_quickly(folder: Path, *, deep: bool) -> dict[str, Entry]:
    """Check presence, kind, size and index of all files, and the contents of the small ones; `deep` hashes all of them.

    Returns:
        The manifest.

    Raises:
        CheckpointError: With every file that is not as it was saved.
    """
    manifest = read_manifest(folder)
    raise_all(CheckpointError, size_problems(folder, manifest))
    names = [name for name in manifest if deep or not is_shard(name)]
    raise_all(CheckpointError, [*index_problems(folder, manifest), *checksum_problems(folder, manifest, names)])
    state = State.load(folder)
    SavedAxes.load(folder)  # whose types are not covered by checksums
    raise_all(CheckpointError, step_problems(folder, manifest, state))
    return manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruning:
    """Which checkpoints of a run stay, each with the reason, and which go.

    Args:
        kept: Checkpoints that stay, and why.
        removed: Checkpoints that go, the oldest first.
    """

    kept: dict[Path, str]
    removed: tuple[Path, ...]


def plan_pruning(output_dir: Path, *, keep: int) -> Pruning:
    """Choose the checkpoints that a run no longer needs: all but the newest `keep` whole ones and the best.

    Damaged ones stay, and count for nothing: their files may still be copied again.
    """
    found = list_checkpoints(output_dir)
    kept: dict[Path, str] = {}
    whole: list[Path] = []
    for folder in found:
        try:
            verify_quickly(folder, deep=False)
            whole.append(folder)
        except CheckpointError as error:
            kept[folder] = f"damaged: {error.problems[0].message}"
    kept |= dict.fromkeys(whole[-keep:], f"one of the newest {keep}")
    best = _best(whole)
    if best is not None:
        kept.setdefault(best, "the best")
    return Pruning(
        kept={path: kept[path] for path in found if path in kept},
        removed=tuple(path for path in whole if path not in kept),
    )


def _best(whole: list[Path]) -> Path | None:
    """Return the checkpoint of the best evaluation, as the last one knows it (`toolkit.checkpoint.best`)."""
    if not whole:
        return None
    step = best_step(State.load(whole[-1]).hooks)
    folder = None if step is None else whole[-1].with_name(checkpoint_name(step))
    return folder if folder in whole else None
