"""`toolkit checkpoint`: lists a run's checkpoints and verifies them."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from toolkit.cli.options import JsonOption
from toolkit.cli.output import new_table, print_json, print_table
from toolkit.config.paths import is_folder
from toolkit.errors import CheckError, CheckpointError
from toolkit.units import format_bytes

_GROUP = typer.Typer(no_args_is_help=True, help="List and verify checkpoints.")


def register(app: typer.Typer) -> None:
    """Add the group of commands."""
    app.add_typer(_GROUP, name="checkpoint")


@_GROUP.command("list")
def list_command(
    output_dir: Annotated[Path, typer.Argument(help="The job's train.output_dir.")], as_json: JsonOption = False
) -> None:
    """List the complete checkpoints of a run, in the order in which they were saved.

    Example: `toolkit checkpoint list runs/my-job`

    JSON keys: checkpoints (path, step, zero_stage, world_size, pipeline, tensor, bytes, saved, damaged); of a damaged one, whose own
    description cannot be read, only path and step are known.
    """
    from toolkit.checkpoint.discovery import list_checkpoints

    if not is_folder(output_dir, key=str(output_dir)):
        raise CheckpointError.of(
            code="CHECKPOINT_NOT_FOUND",
            key=str(output_dir),
            message=f"{output_dir} is not a folder",
            fix="Name the train.output_dir of a job",
        )
    rows = [_describe(folder) for folder in list_checkpoints(output_dir)]
    if as_json:
        print_json({"checkpoints": rows})
        return
    if not rows:
        print(f"{output_dir} has no complete checkpoint")
        return
    numbers = ["step", "ZeRO", "ranks", "pipeline", "tensor", "size"]
    table = new_table([*numbers, "saved", "path"], right=numbers)
    for row in rows:
        if row["damaged"]:
            table.add_row(str(row["step"]), *[""] * (len(numbers) - 1), "damaged", row["path"])
            continue
        sizes = [row[key] for key in ("step", "zero_stage", "world_size", "pipeline", "tensor")]
        known = ["" if size is None else str(size) for size in sizes]
        table.add_row(*known, format_bytes(row["bytes"]), row["saved"], row["path"])
    print_table(table)


def _describe(folder: Path) -> dict[str, Any]:
    """Return a row of the list, also for a damaged checkpoint, which must not hide the others."""
    from toolkit.checkpoint.layout import step_of
    from toolkit.checkpoint.manifest import read_manifest
    from toolkit.checkpoint.state import SavedAxes, State

    try:
        state, manifest, axes = State.load(folder), read_manifest(folder), SavedAxes.load(folder)
    except CheckpointError:
        unknown = dict.fromkeys(("zero_stage", "world_size", "pipeline", "tensor", "bytes", "saved"))
        return {"path": str(folder), "step": step_of(folder), **unknown, "damaged": True}
    return {
        "path": str(folder),
        "step": state.step,
        "zero_stage": state.zero_stage,
        "world_size": state.world_size,
        "pipeline": axes.pipeline,
        "tensor": axes.tensor,
        "bytes": sum(entry.num_bytes for entry in manifest.values()),
        "saved": datetime.fromtimestamp(state.saved_at).isoformat(timespec="seconds"),
        "damaged": False,
    }


@_GROUP.command("verify")
def verify_command(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint-STEP folder.")], as_json: JsonOption = False
) -> None:
    """Check that every file of a checkpoint is there, byte for byte, and says what it must, before a launch depends on it.

    Example: `toolkit checkpoint verify runs/my-job/checkpoint-500`

    JSON keys: checkpoint, files, bytes.
    """
    from toolkit.checkpoint.manifest import verify
    from toolkit.checkpoint.state import SavedAxes, State

    try:
        manifest = verify(checkpoint)
        State.load(checkpoint), SavedAxes.load(checkpoint)  # whose types are not covered by checksums
    except CheckpointError as error:
        if set(error.codes) <= {"CHECKPOINT_DAMAGED", "CHECKPOINT_INCOMPLETE"}:
            raise CheckError(*error.problems) from None
        raise
    size = sum(entry.num_bytes for entry in manifest.values())
    if as_json:
        print_json({"checkpoint": str(checkpoint), "files": len(manifest), "bytes": size})
        return
    print(f"{checkpoint} is complete: {len(manifest)} files, {format_bytes(size)}, every checksum matches")
