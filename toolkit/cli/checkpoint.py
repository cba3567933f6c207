"""`toolkit checkpoint`: what checkpoints a run has, what is in one, whether it is whole, which can go, and those of other programs."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from toolkit.cli.options import JsonOption
from toolkit.cli.output import new_table, print_fields, print_json, print_table
from toolkit.config.paths import is_folder
from toolkit.errors import CheckError, CheckpointError
from toolkit.units import format_bytes, format_count

_DAMAGE = {"CHECKPOINT_DAMAGED", "CHECKPOINT_INCOMPLETE", "EXPORT_DAMAGED", "EXPORT_INCOMPLETE", "EXPORT_NO_CHECKPOINT"}
_GROUP = typer.Typer(no_args_is_help=True, help="List, inspect, verify, compare, convert, adopt and prune checkpoints.")


def register(app: typer.Typer) -> None:
    """Add the group of commands."""
    app.add_typer(_GROUP, name="checkpoint")


@_GROUP.command("list")
def list_command(
    output_dir: Annotated[Path, typer.Argument(help="The job's train.output_dir.")], as_json: JsonOption = False
) -> None:
    """List the checkpoints of a run, in the order in which they were saved; first those that are damaged or have no manifest.

    Example: `toolkit checkpoint list runs/my-job`

    JSON keys: checkpoints (path, step, zero_stage, world_size, pipeline, tensor, bytes, saved, damaged); of a damaged one, whose own
    description cannot be read, only path and step are known.
    """
    from toolkit.checkpoint.discovery import list_checkpoints, without_manifest

    _check_output_dir(output_dir)
    rows = [_describe(folder) for folder in (*without_manifest(output_dir), *list_checkpoints(output_dir))]
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


def _check_output_dir(output_dir: Path) -> None:
    if not is_folder(output_dir, key=str(output_dir)):
        raise CheckpointError.of(
            code="CHECKPOINT_NOT_FOUND",
            key=str(output_dir),
            message=f"{output_dir} is not a folder",
            fix="Name the train.output_dir of a job",
        )


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


@_GROUP.command("inspect")
def inspect_command(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint-STEP folder, or an output_dir for its latest.")],
    as_json: JsonOption = False,
) -> None:
    """Say what a checkpoint is: its step, model, the ranks that wrote it, its size, and what can load it. Reads its small files alone.

    Also of another program's: DeepSpeed's, also as Trainer, Accelerate and Lightning save it, FSDP's or a universal one.

    Example: `toolkit checkpoint inspect runs/my-job/checkpoint-500`

    JSON keys: checkpoint, format (toolkit), tag, step, num_steps, saved, model, parameters, strategy, zero_stage (null without ZeRO),
    world_size, pipeline, data, tensor, sequence_parallel, experts (null unless tensor ranks share them), virtual_stages, offload, method, precision, optimizer, bytes, bytes_by_kind,
    versions, has_optimizer, loads. Of another program's: checkpoint, format (deepspeed, universal, distributed), tag, step, strategy,
    zero_stage, world_size, parameters, dtype, method, bytes, versions, has_optimizer, loads; null is what it does not say.
    """
    from toolkit.checkpoint.inspection import inspect

    other = _other(checkpoint)
    if other is not None:
        from toolkit.exporter.other_inspection import inspect_other

        found = inspect_other(other)
        print_json(found) if as_json else _print_other(found)
        return
    found = inspect(_checkpoint(checkpoint))
    if as_json:
        print_json(found)
        return
    ranks = (
        f"{found['world_size']} rank(s): pipeline {found['pipeline']} × data {found['data']} × tensor {found['tensor']}"
    )
    wrote = found["strategy"] if found["zero_stage"] is None else f"ZeRO-{found['zero_stage']}"
    extras = {
        f"{found['virtual_stages']} virtual stages": found["virtual_stages"] > 1,
        "sequence parallel": found["sequence_parallel"],
        f"experts {found['experts']}": found["experts"] is not None,
        f"offload {found['offload']}": found["offload"] not in (None, "none"),
    }
    sizes = {kind: size for kind, size in found["bytes_by_kind"].items() if size}
    fields = [
        ("checkpoint", found["checkpoint"]),
        ("tag", found["tag"]),
        ("step", f"{found['step']} of {'an unknown number' if found['num_steps'] is None else found['num_steps']}"),
        (
            "saved",
            f"{found['saved']}, by {', '.join(f'{name} {version}' for name, version in found['versions'].items())}",
        ),
        ("model", f"{found['model']}, {_parameters(found['parameters'])}"),
        ("trained", f"{found['method']}, {found['precision']}, {found['optimizer']}"),
        ("written by", ", ".join((wrote, ranks, *(text for text, applies in extras.items() if applies)))),
        (
            "size",
            f"{format_bytes(found['bytes'])}: {', '.join(f'{kind} {format_bytes(size)}' for kind, size in sizes.items())}",
        ),
        *(("loaded by" if not number else "", text) for number, text in enumerate(found["loads"])),
    ]
    print_fields(fields)


def _other(path: Path) -> Any:
    """Return another program's checkpoint, an `OtherFolder`; None for everything else."""
    from toolkit.checkpoint.layout import MANIFEST
    from toolkit.checkpoint.manifest import ADOPTABLE

    is_folder(path, key=str(path))  # refuses a path that the system does
    if (path / MANIFEST).exists() or not any(any(path.glob(name)) for name in ADOPTABLE):
        return None  # without imports that take seconds
    from toolkit.cli.export import load_exporter
    from toolkit.modeling.lean_imports import quick_imports

    with quick_imports():
        load_exporter()
        from toolkit.exporter.other_folders import find_other
    return find_other(path)


_FORMATS = {
    "deepspeed": "of DeepSpeed's engine",
    "universal": "in DeepSpeed's universal format",
    "distributed": "of torch's distributed checkpoint, as FSDP saves it",
}


def _print_other(found: dict[str, Any]) -> None:
    stage = "" if found["zero_stage"] is None else f"ZeRO-{found['zero_stage']}, "
    ranks = "an unknown number of ranks" if found["world_size"] is None else f"{found['world_size']} rank(s)"
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    model = ", ".join(str(text) for text in (found["method"], found["dtype"]) if text is not None)
    print_fields(
        [
            ("checkpoint", found["checkpoint"]),
            ("written by", f"another program: files {_FORMATS[found['format']]}{', ' if versions else ''}{versions}"),
            ("tag", found["tag"]),
            ("step", "unknown" if found["step"] is None else str(found["step"])),
            ("ranks", f"{stage}{ranks}"),
            ("weights", f"{_parameters(found['parameters'])}{', ' if model else ''}{model}"),
            ("optimizer", "its state is saved" if found["has_optimizer"] else "no state"),
            ("size", format_bytes(found["bytes"])),
            *(("loaded by" if not number else "", text) for number, text in enumerate(found["loads"])),
        ]
    )


def _parameters(count: int | None) -> str:
    return "of unknown size" if count is None else f"{format_count(count)} parameters"


def _checkpoint(path: Path) -> Path:
    """Return a checkpoint, or the latest of the output folder that is named."""
    from toolkit.checkpoint.discovery import latest_checkpoint
    from toolkit.checkpoint.layout import step_of

    is_folder(path, key=str(path))  # refuses a path that the system does
    return latest_checkpoint(path) if step_of(path) is None and list(path.glob("checkpoint-*")) else path


@_GROUP.command("verify")
def verify_command(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint-STEP folder.")],
    deep: Annotated[
        bool, typer.Option("--deep", help="Hash every byte, not only the small files and the indexes.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check a checkpoint before a launch depends on it: every file is there, has its size and its tensors, and says what it must.

    That reads little and takes seconds. `--deep` also compares every byte, which a resume does anyway. Another program's checkpoint has no
    manifest and no hashes: that all ranks' files are there and can be read is checked, with `--deep` each tensor by its archive's CRC-32.

    Example: `toolkit checkpoint verify runs/my-job/checkpoint-500`

    JSON keys: checkpoint, files, bytes, deep, hashes (whether there are any).
    """
    from toolkit.checkpoint.inspection import verify_quickly

    try:
        other = _other(checkpoint)
        if other is not None:
            from toolkit.exporter.other_inspection import verify_other

            paths = verify_other(other, deep=deep)
            count, size = len(paths), sum(path.stat().st_size for path in paths)
        else:
            manifest = verify_quickly(checkpoint, deep=deep)
            count, size = len(manifest), sum(entry.num_bytes for entry in manifest.values())
    except CheckpointError as error:
        if set(error.codes) <= _DAMAGE:
            raise CheckError(*error.problems) from None
        raise
    if as_json:
        sizes = {"files": count, "bytes": size}
        print_json({"checkpoint": str(checkpoint), **sizes, "deep": deep, "hashes": other is None})
        return
    if other is not None:
        read = "every tensor is as its archive says" if deep else "every index can be read; --deep reads every byte"
        print(f"{checkpoint} has all ranks' files: {count} files, {format_bytes(size)}, {read}")
        print(
            "Another program wrote it, without hashes: values that were changed together with their archive are not seen"
        )
        return
    what = (
        "every checksum matches"
        if deep
        else "every size and index matches, and the checksums of the small ones; --deep compares all"
    )
    print(f"{checkpoint} is complete: {count} files, {format_bytes(size)}, {what}")


@_GROUP.command("diff")
def diff_command(
    first: Annotated[
        Path, typer.Argument(help="A checkpoint-STEP folder, another program's checkpoint, or an export.")
    ],
    second: Annotated[Path, typer.Argument(help="Another one, of any layout.")],
    optimizer: Annotated[bool, typer.Option(help="Compare the states of the optimizers too.")] = True,
    limit: Annotated[int, typer.Option(min=1, help="Number of tensors that are shown.")] = 20,
    model: Annotated[
        Path | None,
        typer.Option("--model", help="Folder with config.json, for another program's checkpoint beside none."),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the Python code of the checkpoint's model.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Say which tensors of two checkpoints differ, and by how much; exit code 1 if any does.

    Both may be of any layout: whole tensors are compared by name, one of each in memory at a time. Beside an export, weights alone
    are compared, under its names and in its dtype; beside another program's checkpoint, those states of the optimizer that both have.

    Example: `toolkit checkpoint diff runs/a/checkpoint-500 runs/b/checkpoint-500`

    JSON keys: equal (number of tensors by kind: weight, master, states of the optimizer), different (kind, name, elements, different,
    largest, relative, shapes), only_first, only_second, steps.
    """
    from toolkit.cli.export import load_exporter
    from toolkit.modeling.lean_imports import quick_imports

    for path in (first, second):
        is_folder(path, key=str(path))
    with quick_imports():
        load_exporter()
        from toolkit.reshape.compare import compare, rows
    found = compare(first, second, optimizer=optimizer, trust_remote_code=trust_remote_code, model=model)
    different = list(rows(found))
    if as_json:
        only = {"only_first": list(found.only_first), "only_second": list(found.only_second)}
        print_json({"equal": found.num_equal, "different": different, **only, "steps": list(found.steps)})
        raise typer.Exit(0 if found.is_equal else 1)
    print(
        f"{sum(found.num_equal.values())} tensors are equal: {', '.join(f'{n} {kind}' for kind, n in found.num_equal.items())}"
    )
    if different:
        table = new_table(
            ["kind", "tensor", "different", "of", "largest", "relative"],
            right=["different", "of", "largest", "relative"],
        )
        for row in different[:limit]:
            sizes = [row["different"], row["elements"], row["largest"], row["relative"]]
            if row["shapes"] is not None:
                sizes = ["shapes", " and ".join(map(str, row["shapes"])), None, None]
            table.add_row(row["kind"], row["name"], *("" if each is None else _short(each) for each in sizes))
        print_table(table)
        if len(different) > limit:
            print(f"and {len(different) - limit} more")
    for folder, names in ((first, found.only_first), (second, found.only_second)):
        if names:
            print(f"{folder} alone has {len(names)}: {', '.join(names[:limit])}{' …' if len(names) > limit else ''}")
    if found.steps[0] != found.steps[1]:
        print(f"their optimizers have done {found.steps[0]} and {found.steps[1]} steps")
    raise typer.Exit(0 if found.is_equal else 1)


def _short(value: float | int | str) -> str:
    return f"{value:.3g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value


@_GROUP.command("prune")
def prune_command(
    output_dir: Annotated[Path, typer.Argument(help="The job's train.output_dir.")],
    keep: Annotated[int, typer.Option("--keep", min=1, help="Number of the newest checkpoints that stay.")] = 2,
    yes: Annotated[
        bool, typer.Option("--yes", help="Delete them. Without it the command says what it would delete.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Delete old checkpoints of a run that has ended; the newest whole ones, the best and damaged ones stay.

    Example: `toolkit checkpoint prune runs/my-job --keep 2 --yes`

    JSON keys: kept (path, reason), removed (path, bytes), deleted (whether they are).
    """
    from contextlib import nullcontext

    from toolkit.checkpoint.discovery import remove
    from toolkit.checkpoint.inspection import plan_pruning
    from toolkit.checkpoint.manifest import read_manifest
    from toolkit.launch.output_lock import hold_output

    _check_output_dir(output_dir)
    with hold_output(output_dir) if yes else nullcontext():
        plan = plan_pruning(output_dir, keep=keep)
        sizes = {path: sum(entry.num_bytes for entry in read_manifest(path).values()) for path in plan.removed}
        if yes:
            for path in plan.removed:
                remove(path)
    if as_json:
        kept = [{"path": str(path), "reason": reason} for path, reason in plan.kept.items()]
        removed = [{"path": str(path), "bytes": size} for path, size in sizes.items()]
        print_json({"kept": kept, "removed": removed, "deleted": yes})
        return
    for path, reason in plan.kept.items():
        print(f"keep    {path}: {reason}")
    for path, size in sizes.items():
        print(f"{'deleted' if yes else 'delete '} {path}: {format_bytes(size)}")
    if not yes and sizes:
        print(f"Nothing is deleted yet; --yes frees {format_bytes(sum(sizes.values()))}")


@_GROUP.command("convert")
def convert_command(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint-STEP folder, or an output_dir for its latest.")],
    out: Annotated[Path, typer.Argument(help="Folder of the new checkpoint.")],
    max_file_size: Annotated[str, typer.Option(help="Size above which a new file begins.")] = "5GB",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the contents of OUT.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the Python code that the checkpoint's model brings.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a checkpoint as safetensors of whole weights, fp32 copies and optimizer states, by the names of the model.

    It resumes as the checkpoint does, on any ranks and with any strategy; a resume needs no conversion. A conversion that ends early
    leaves nothing.

    Example: `toolkit checkpoint convert runs/my-job/checkpoint-500 portable/checkpoint-500`

    JSON keys: folder, step, num_tensors, bytes, workers, largest_bytes (host memory is about that times workers).
    """
    from rich.progress import Progress

    from toolkit.cli.export import load_exporter, parse_size
    from toolkit.trainer.progress import SteadyConsole

    size, console, source = parse_size(max_file_size), SteadyConsole(stderr=True), _checkpoint(checkpoint)
    load_exporter()
    from toolkit.reshape.convert import convert

    with Progress(console=console, transient=True, disable=as_json or not console.is_terminal) as bar:
        task = bar.add_task("tensors", total=None)
        done = convert(
            source,
            out,
            max_file_bytes=size,
            overwrite=overwrite,
            trust_remote_code=trust_remote_code,
            progress=lambda count, total: bar.update(task, completed=count, total=total),
        )
    if as_json:
        sizes = {"bytes": done.num_bytes, "workers": done.workers, "largest_bytes": done.largest_bytes}
        print_json({"folder": str(done.folder), "step": done.step, "num_tensors": done.num_tensors, **sizes})
        return
    memory = f"{done.workers} at a time, of at most {format_bytes(done.largest_bytes)}"
    print_fields(
        [
            ("checkpoint", str(done.folder)),
            ("step", str(done.step)),
            ("tensors", f"{done.num_tensors}, {format_bytes(done.num_bytes)}; {memory}"),
        ]
    )


@_GROUP.command("adopt")
def adopt_command(
    folder: Annotated[
        Path, typer.Argument(help="A checkpoint of DeepSpeed, Trainer, Accelerate or FSDP, or a universal one.")
    ],
    out: Annotated[Path, typer.Argument(help="Folder of the new checkpoint.")],
    job: Annotated[Path, typer.Option("--job", help="The job that will go on from it.")],
    step: Annotated[
        int | None, typer.Option(min=1, help="Optimizer steps done, where the folder does not say it.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the contents of OUT.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write another program's checkpoint as one that a job resumes from: weights, fp32 copies, AdamW's moments and its count of steps.

    Nothing of the folder runs. Where the job's data goes on is its own order of rows, after as many steps.

    Example: `toolkit checkpoint adopt old-run/checkpoint-500 runs/my-job/checkpoint-500 --job job.yaml`

    JSON keys: folder, step, num_tensors, bytes.
    """
    from toolkit.cli.export import load_exporter
    from toolkit.cli.options import read_plan

    plan = read_plan(job)
    is_folder(folder, key=str(folder))
    load_exporter()
    from toolkit.reshape.adopt import adopt

    done = adopt(folder, out, plan, step=step, overwrite=overwrite)
    if as_json:
        print_json(
            {"folder": str(done.folder), "step": done.step, "num_tensors": done.num_tensors, "bytes": done.num_bytes}
        )
        return
    print_fields(
        [
            ("checkpoint", str(done.folder)),
            ("step", str(done.step)),
            ("tensors", f"{done.num_tensors}, {format_bytes(done.num_bytes)}"),
            ("go on", f"toolkit train {job} --resume_from_checkpoint {done.folder}"),
        ]
    )
