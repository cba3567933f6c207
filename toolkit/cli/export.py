"""`toolkit export`: a checkpoint as Hugging Face safetensors."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from toolkit.checkpoint.layout import MODEL
from toolkit.cli.options import JsonOption
from toolkit.cli.output import print_fields, print_json
from toolkit.config.paths import is_folder
from toolkit.errors import RunError, SpecError, raise_all
from toolkit.units import format_bytes

if TYPE_CHECKING:
    from toolkit.exporter.checkpoint import Export

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(export)


def export(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT",
            help="A checkpoint-STEP folder, an output_dir for its latest, or a checkpoint of DeepSpeed, Trainer, Accelerate or FSDP.",
        ),
    ],
    out: Annotated[Path | None, typer.Option("--out", help="Folder to create. Default: `export` next to it.")] = None,
    dtype: Annotated[
        Literal["bf16", "fp16", "fp32"] | None,
        typer.Option(help="Weights' precision. Default: the training precision. fp32 reads the master weights."),
    ] = None,
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Largest file, as 5GB or 500MB.")] = "5GB",
    merge_adapter: Annotated[
        bool, typer.Option("--merge-adapter", help="LoRA: merge the adapter into the base model.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Overwrite the folder.")] = False,
    check_logits: Annotated[
        bool | None,
        typer.Option(help="Reload the export and compare its scores with the live model's. Default: for small models."),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the Python code of the checkpoint's model.")
    ] = False,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder with config.json and tokenizer, for another program's checkpoint without them.",
        ),
    ] = None,
    push_to_hub: Annotated[
        str | None,
        typer.Option("--push-to-hub", metavar="REPO", help="Upload the export to this repository, `owner/name`."),
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="Create that repository as public. Default: private, until you publish it.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write safetensors, config, tokenizer and a model card that `from_pretrained` loads, from a checkpoint of any ZeRO stage.

    What it reads of the checkpoint is verified first, and nothing of it runs unless --trust-remote-code says so; names,
    shapes and the ends of all values are read back after. README.md is a model card: base model, data, settings, figures, versions.

    Example: `toolkit export runs/my-job/checkpoint-500 --out my-model`

    JSON keys: folder, kind, dtype, files, num_tensors, num_bytes, untied, verified, logits_difference, not_compared
    (why the scores were not, else null), hub (address of the repository, or null).
    """
    from rich.progress import Progress

    from toolkit.checkpoint.discovery import latest_checkpoint
    from toolkit.checkpoint.layout import step_of
    from toolkit.launch.packages import token_problems
    from toolkit.trainer.checks import EXPORT_FOLDER
    from toolkit.trainer.progress import SteadyConsole

    size = parse_size(max_shard_size)
    if public and push_to_hub is None:
        raise typer.BadParameter("it is about the repository of --push-to-hub", param_hint="--public")
    raise_all(RunError, token_problems("--push-to-hub", push_to_hub))
    is_folder(checkpoint, key="CHECKPOINT")  # refuses a path that the system does
    if step_of(checkpoint) is None and list(checkpoint.glob("checkpoint-*")):
        checkpoint = latest_checkpoint(checkpoint)
    export_checkpoint = _load_quickly(checkpoint, model or checkpoint, trust_remote_code=trust_remote_code)
    target = out or checkpoint.parent / EXPORT_FOLDER
    console = SteadyConsole(stderr=True)
    with Progress(console=console, transient=True, disable=as_json or not console.is_terminal) as bar:
        task = bar.add_task("tensors", total=None)
        done = export_checkpoint(
            checkpoint,
            target,
            dtype=dtype,
            max_shard_size_bytes=size,
            merge_adapter=merge_adapter,
            overwrite=overwrite,
            check_logits=check_logits,
            trust_remote_code=trust_remote_code,
            model=model,
            progress=lambda count, total: bar.update(task, completed=count, total=total),
        )
    address = None
    try:
        if push_to_hub is not None:
            from toolkit.exporter.hub import push

            address = push(done.folder, push_to_hub, public=public)
    finally:  # the export is there either way
        if not as_json:
            print_fields(export_fields(done))
    if as_json:
        print_json(export_as_dict(done) | {"hub": address})
    elif address is not None:
        print_fields([("hub", address)])


def _load_quickly(checkpoint: Path, model: Path, *, trust_remote_code: bool) -> Callable[..., Export]:
    """Return `tk.export` for one checkpoint and the end of the process: without packages that DeepSpeed's files of whole models do not need."""
    from toolkit.modeling.lean_imports import lean_imports, quick_imports

    adapters = [folder / "adapter_config.json" for folder in (checkpoint / MODEL, checkpoint, checkpoint.parent, model)]
    needs_all = trust_remote_code or any(path.exists() for path in adapters) or any(checkpoint.glob("*/engine.json"))
    with quick_imports() if needs_all else lean_imports():
        return load_exporter()


def load_exporter() -> Callable[..., Export]:
    """Return `tk.export`, loaded for work on the CPU."""
    # Without it DeepSpeed, which the checkpoint's pickles need, looks for cards and logs what it found. Export uses none.
    os.environ["DS_ACCELERATOR"] = "cpu"
    from toolkit.trainer.worker import quiet_warnings

    quiet_warnings()
    from toolkit.exporter.checkpoint import export as export_checkpoint

    return export_checkpoint


def parse_size(text: str) -> int:
    """Read a size such as 5GB, 500MB or 2GiB as bytes.

    >>> parse_size("5GB"), parse_size("1.5 MiB")
    (5000000000, 1572864)
    """
    cleaned = text.strip().upper().replace(" ", "")
    for unit in sorted(_UNITS, key=len, reverse=True):
        if cleaned.endswith(unit):
            try:
                size = int(float(cleaned.removesuffix(unit)) * _UNITS[unit])
            except (ValueError, OverflowError):
                break
            if size > 0:
                return size
    raise SpecError.of(
        code="SIZE_SYNTAX",
        key="--max-shard-size",
        message=f"--max-shard-size {text} is not a size",
        fix="Write a number and KB, MB, GB, KiB, MiB or GiB, such as 5GB",
    )


def export_as_dict(done: Export) -> dict[str, Any]:
    """Return the JSON object of an export."""
    report = done.report
    return {
        "folder": str(done.folder),
        "kind": report.kind,
        "dtype": report.dtype,
        "files": list(report.files),
        "num_tensors": report.num_tensors,
        "num_bytes": report.num_bytes,
        "untied": list(report.untied),
        "verified": report.verified,
        "logits_difference": done.logits_difference,
        "not_compared": done.not_compared,
    }


def describe_scores(difference: float) -> str:
    """Return how close the reloaded export's logits are to the trained model's, as text."""
    near = "exactly" if difference == 0 else f"within {difference:.1e} of the largest"
    return f"reloaded, its scores equal the trained model's {near}"


def describe_checks(done: Export) -> str:
    """Return what of an export was checked, and what was not and why, as text."""
    read = "names, shapes and sampled values verified; "
    if done.logits_difference is not None:
        return read + describe_scores(done.logits_difference)
    return f"{read}scores not compared: {done.not_compared}"


def export_fields(done: Export) -> list[tuple[str, str]]:
    """Return the name and value pairs to print."""
    report = done.report
    return [
        ("export", str(done.folder)),
        ("kind", f"{report.kind}, {report.dtype}"),
        ("size", f"{report.num_tensors} tensors, {format_bytes(report.num_bytes)} in {len(report.files)} file(s)"),
        ("checked", describe_checks(done)),
    ]
