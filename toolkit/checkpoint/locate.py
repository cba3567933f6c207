"""Which checkpoints a run has."""

from __future__ import annotations

import shutil
from pathlib import Path

from toolkit.checkpoint.layout import MANIFEST, step_of
from toolkit.errors import CheckpointError


def list_checkpoints(output_dir: Path) -> tuple[Path, ...]:
    """Gives the complete checkpoints of a run, oldest first."""
    found = [(step_of(path), path) for path in output_dir.glob("checkpoint-*") if (path / MANIFEST).is_file()]
    return tuple(path for step, path in sorted((step, path) for step, path in found if step is not None))


def latest_checkpoint(output_dir: Path) -> Path:
    """Gives the last complete checkpoint of a run.

    Raises:
        CheckpointError: CHECKPOINT_NONE when there is none.
    """
    found = list_checkpoints(output_dir)
    if not found:
        raise CheckpointError.of(
            code="CHECKPOINT_NONE",
            key=str(output_dir),
            message=f"{output_dir} holds no complete checkpoint",
            fix="Train without --resume_from_checkpoint, or name the folder of a checkpoint",
        )
    return found[-1]


def rotate(output_dir: Path, *, keep: int) -> tuple[Path, ...]:
    """Removes the oldest complete checkpoints beyond `keep`, which is at least 1.

    A checkpoint goes in two moves: renamed, so that a crash leaves no half of it under a good name, then deleted.

    Returns:
        What was removed.
    """
    removed = []
    for path in list_checkpoints(output_dir)[:-keep]:
        doomed = path.with_name(f".{path.name}.removed")
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)
        removed.append(path)
    return tuple(removed)


def remove_leftovers(output_dir: Path) -> None:
    """Deletes what runs that ended while saving or rotating left behind."""
    for pattern in (".checkpoint-*.partial", ".checkpoint-*.removed"):
        for path in output_dir.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)
