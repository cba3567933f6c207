"""Requirements of training in addition to a valid plan; needs no torch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from toolkit.checkpoint.layout import step_of
from toolkit.errors import PlanError, Problem, raise_all
from toolkit.io import nearest_folder
from toolkit.launch.output_lock import write_problems
from toolkit.planning.checkpoint_size import foreseen_disk_use
from toolkit.planning.plan import Plan
from toolkit.units import format_bytes

# Folder of output_dir for the safetensors of the finished run.
EXPORT_FOLDER = "export"
# Names of what a profile writes into output_dir.
PROFILE_FOLDER, PROFILE_SUMMARY = "profile", "summary.json"


def check_stop_after(stop_after: int | None, step: int) -> None:
    """Refuse to end a session at or before the step at which it begins.

    Raises:
        PlanError: STOP_AFTER.
    """
    if stop_after is None or stop_after > step:
        return
    raise PlanError.of(
        code="STOP_AFTER",
        key="--stop-after",
        message=f"stop_after={stop_after} is not after step {step}, from which the run resumes",
        fix=f"Steps count from the run's beginning: give at least {step + 1}",
    )


def guard_output(plan: Plan, *, resuming: bool, overwrite: bool, exports: bool) -> None:
    """Keep a new run from mixing with what an earlier one left in output_dir; delete that with `overwrite`.

    Args:
        plan: Resolved plan.
        resuming: Whether a checkpoint is resumed.
        overwrite: Whether an earlier run is deleted.
        exports: Whether the finished run is exported into output_dir.

    Raises:
        PlanError: OUTPUT_EXISTS, OUTPUT_WRITE, EXPORT_EXISTS.
    """
    raise_all(PlanError, output_problems(plan, resuming=resuming, overwrite=overwrite, exports=exports))
    folder = plan.output_dir
    if resuming or not overwrite or not held_output(folder):
        return
    folders = (EXPORT_FOLDER, "tensorboard", PROFILE_FOLDER)
    for name in (*held_output(folder), *folders, "samples.jsonl"):
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.is_dir() or name not in folders:  # a file by the name of a folder is no run's
            path.unlink(missing_ok=True)


def output_problems(plan: Plan, *, resuming: bool, overwrite: bool, exports: bool) -> Iterator[Problem]:
    """Yield a problem if output_dir contains an earlier run, has a file where the export will be, or cannot be written."""
    folder = plan.output_dir
    held = held_output(folder)
    if held and not resuming and not overwrite:
        yield Problem(
            code="OUTPUT_EXISTS",
            key="train.output_dir",
            message=f"output_dir={folder} contains an earlier run: "
            f"{', '.join(held[:4])}{' ...' if len(held) > 4 else ''}",
            fix="Resume with --resume_from_checkpoint latest (in Python `resume='latest'`; `auto` also starts new "
            "runs), choose another train.output_dir, or delete it, as --overwrite does",
        )
    export = folder / EXPORT_FOLDER
    if exports and os.path.lexists(export) and not export.is_dir():
        yield Problem(
            code="EXPORT_EXISTS",
            key="train.output_dir",
            message=f"{export} is not a folder: the finished run is exported into a folder of that name, which replaces no file",
            fix="Move that file, choose another train.output_dir, or train with --no-export",
        )
    yield from write_problems(folder)


def space_warnings(plan: Plan) -> Iterator[str]:
    """Yield a warning if the disk of output_dir has less space than the run will need; each save checks its own part again."""
    use = foreseen_disk_use(plan)
    if use is None:
        return
    folder = plan.output_dir
    kept = [*(path for path in folder.glob("checkpoint-*") if step_of(path) is not None), folder / EXPORT_FOLDER]
    held = sum(path.stat().st_size for part in kept for path in part.rglob("*") if path.is_file())
    free = shutil.disk_usage(nearest_folder(folder)).free + held
    if use.total_bytes > free:
        yield (
            f"output_dir={folder} has {format_bytes(free)} of room, and the run keeps up to {format_bytes(use.total_bytes)} "
            f"there ({use.num_checkpoints} × {format_bytes(use.checkpoint_bytes)} of checkpoints, the export): lower "
            "train.save_total_limit, or set train.output_dir to a larger disk"
        )


def held_output(folder: Path) -> list[str]:
    """Return the names of an earlier run's files in output_dir with which a new run would mix."""
    held = sorted(path.name for path in folder.glob("checkpoint-*") if step_of(path) is not None)
    return [*held, "metrics.jsonl"] if (folder / "metrics.jsonl").exists() else held
