"""The checkpoints of a run."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from toolkit.checkpoint.layout import MANIFEST, step_of
from toolkit.checkpoint.manifest import read_manifest, size_problems
from toolkit.checkpoint.state import State
from toolkit.errors import CheckpointError


def list_checkpoints(output_dir: Path) -> tuple[Path, ...]:
    """Return the complete checkpoints of a run, in the order in which they were saved; damaged ones, whose time is unknown, first.

    That is the order of their steps, unless a run went back to an earlier checkpoint and continued from there:
    the checkpoints saved since are the ones to keep and resume.
    """
    found = [path for path in output_dir.glob("checkpoint-*") if (path / MANIFEST).is_file()]
    return tuple(sorted((path for path in found if step_of(path) is not None), key=_saved))


def without_manifest(output_dir: Path) -> tuple[Path, ...]:
    """Return folders with a checkpoint's name and no manifest, by step: another program's, or copies that are not whole.

    No run of ours leaves one. Empty folders, and those with hidden files alone, are left out.
    """

    def holds_something(path: Path) -> bool:
        return not (path / MANIFEST).is_file() and any(not inside.name.startswith(".") for inside in path.iterdir())

    found = (path for path in output_dir.glob("checkpoint-*") if step_of(path) is not None and path.is_dir())
    return tuple(sorted(filter(holds_something, found), key=_step))


def latest_checkpoint(output_dir: Path) -> Path:
    """Return the last complete checkpoint of a run.

    Raises:
        CheckpointError: CHECKPOINT_NONE when there is none; CHECKPOINT_DAMAGED when one of a later step is damaged: falling
            back to the previous one is the user's decision; those of `read_manifest` when a folder of a later step has none.
    """
    found, others = list_checkpoints(output_dir), without_manifest(output_dir)
    if not found and not others:
        raise CheckpointError.of(
            code="CHECKPOINT_NONE",
            key=str(output_dir),
            message=f"{output_dir} has no complete checkpoint",
            fix="Train without --resume_from_checkpoint, or name the folder of a checkpoint",
        )
    latest = (found or others)[-1]
    for path in (*found, *others):
        if _step(path) >= _step(latest):
            _check_state(path, instead=latest)
    return latest


def rotate(output_dir: Path, *, keep: int, best: Path | None = None) -> tuple[Path, ...]:
    """Remove the oldest complete checkpoints beyond `keep`, which is at least 1; the best and the last one stay.

    Returns:
        Folders that were removed.
    """
    found = list_checkpoints(output_dir)
    oldest = found[:-keep]
    if best in oldest:  # it counts as one of those that stay
        oldest = tuple(path for path in found[: -max(keep - 1, 1)] if path != best)
    for path in oldest:
        remove(path)
    return oldest


def remove(folder: Path) -> None:
    """Delete a checkpoint; whenever that ends, none is left under its name that is not whole."""
    doomed = folder.with_name(f".{folder.name}.removed")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _check_state(folder: Path, *, instead: Path) -> None:
    try:
        State.load(folder)
    except CheckpointError as error:
        if folder == instead:
            raise
        is_damaged = set(error.codes) == {"CHECKPOINT_DAMAGED"}
        way = f"copy {folder.name} again from where it was made" if is_damaged else f"move {folder.name} elsewhere"
        fix = f"Name {instead} to continue from there, or {way}"
        raise CheckpointError(*(replace(problem, fix=fix) for problem in error.problems)) from None


def _step(folder: Path) -> int:
    return step_of(folder) or 0


def _saved(folder: Path) -> tuple[float, int]:
    try:
        saved_at = State.load(folder).saved_at
    except CheckpointError:
        saved_at = 0.0  # damaged: the first to go, the last to be resumed
    return saved_at, _step(folder)


def recover(output_dir: Path) -> None:
    """Rename the complete checkpoint that a run, ended between its last two renames, left under a partial one's name."""
    for path in output_dir.glob(".checkpoint-*.partial"):
        target = path.with_name(path.name.removeprefix(".").removesuffix(".partial"))
        if (path / MANIFEST).is_file() and not target.exists() and not _is_cut_short(path):
            _rename(path, target)


def remove_leftovers(output_dir: Path) -> None:
    """Delete partial checkpoints of runs that ended while saving or rotating; keep complete ones."""
    recover(output_dir)
    for pattern in (".checkpoint-*.partial", ".checkpoint-*.removed"):
        for path in output_dir.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def _rename(path: Path, target: Path) -> None:
    """Rename a folder, unless another rank has just done so: each rank must find it under its valid name."""
    try:
        path.rename(target)
    except OSError:
        if path.exists() and not target.exists():
            raise


def _is_cut_short(folder: Path) -> bool:
    try:
        return bool(size_problems(folder, read_manifest(folder)))
    except CheckpointError:
        return True
