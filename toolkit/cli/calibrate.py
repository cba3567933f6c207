"""`toolkit calibrate`: accuracy of the estimates of past runs, and calibration from their measurements."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.cli.options import JsonOption
from toolkit.cli.output import new_table, print_json, print_table
from toolkit.launch.user_cache import user_config_folder

if TYPE_CHECKING:
    from toolkit.memory.report.calibration import MeasuredRun


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(calibrate)


def calibration_path() -> Path:
    """Return the path of this machine's calibration."""
    return user_config_folder() / "calibration.json"


def calibrate(
    metrics: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FILES...]", help="metrics.jsonl of runs on GPUs.", show_default=False),
    ] = None,
    speed: Annotated[
        bool,
        typer.Option(
            "--speed",
            help="Measure how fast this machine's card and host are; or read FILES of benchmarks/card_speed.py.",
        ),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the errors without saving.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show how right past estimates were, and learn what no source code tells: CUDA's context and NCCL's buffers.

    What is learned is kept by card on this machine, and `toolkit estimate` uses it. Peaks of allocated memory are never
    corrected: an error there is a mistake of the estimate.

    With `--speed` alone, the first card of this machine is measured, which takes two to three minutes, and its figures are
    kept for the foreseen time of a step: `toolkit estimate`, `toolkit plan` and their functions use them.

    Example: `toolkit calibrate runs/*/metrics.jsonl`, `toolkit calibrate --speed`.

    JSON keys: runs (file, gpu, num_ranks, errors by phase, context_and_nccl_bytes, outside_bytes), median_error,
    worst_error, calibrations (by card: context_bytes, communicator_bytes), saved_to. With --speed: card, speed (figures with their sources), saved_to.
    """
    from dataclasses import asdict

    if speed:
        if metrics and len(metrics) > 1:
            raise typer.BadParameter("one file of one card at a time", param_hint="--speed")
        _learn_speed(metrics[0] if metrics else None, dry_run=dry_run, as_json=as_json)
        return
    if not metrics:
        raise typer.BadParameter("name the metrics.jsonl of runs, or give --speed")
    from toolkit.memory.report.calibration import learn, load_calibrations, read_run, save_calibrations
    from toolkit.memory.report.overhead import CONTEXT_BYTES

    runs = {path: read_run(path) for path in metrics}
    path = calibration_path()
    learned = learn(runs.values(), load_calibrations(path), context_bytes=CONTEXT_BYTES)
    if not dry_run:
        save_calibrations(path, learned)
    peaks = [abs(run.errors()["peak"]) for run in runs.values()]
    if as_json:
        print_json(
            {
                "runs": [
                    {
                        "file": str(file),
                        "gpu": run.gpu,
                        "num_ranks": run.num_ranks,
                        "errors": run.errors(),
                        "context_and_nccl_bytes": run.context_and_nccl_bytes,
                        "outside_bytes": run.outside_bytes,
                    }
                    for file, run in runs.items()
                ],
                "median_error": statistics.median(peaks),
                "worst_error": max(peaks),
                "calibrations": {card: asdict(calibration) for card, calibration in learned.items()},
                "saved_to": None if dry_run else str(path),
            }
        )
        return
    _print(runs)
    print(f"\npeak: median error {statistics.median(peaks):.2%}, worst {max(peaks):.2%}, over {len(peaks)} runs")
    if not dry_run:
        print(f"context and NCCL of {', '.join(sorted({run.gpu for run in runs.values()}))}: saved to {path}")


def _learn_speed(file: Path | None, *, dry_run: bool, as_json: bool) -> None:
    from toolkit.catalog.gpus import find_gpu, load_catalogue
    from toolkit.catalog.speed import speed_of
    from toolkit.cost.learned import card_of, learn_speed, load_speeds, read_measured, save_speeds, speed_path
    from toolkit.errors import SpecError

    if file is None:
        from toolkit.cost.bench.measure import measure_here  # imports torch

        measured = measure_here()
    else:
        measured = read_measured(file)
    card = card_of(measured, load_catalogue().values())
    if card is None:
        raise SpecError.of(
            code="SPEED_UNREADABLE",
            key="--speed",
            message=f"{measured['about']['card']} was measured, which the catalogue does not have",
            fix="Measure on a card of `toolkit gpus`",
        )
    base, _ = speed_of(find_gpu(card))
    learned, path = learn_speed(measured, base), speed_path()
    if not dry_run:
        save_speeds(path, {**load_speeds(path), card: learned})
    if as_json:
        print_json({"card": card, "speed": learned.model_dump(mode="json"), "saved_to": None if dry_run else str(path)})
        return
    for name in type(learned).model_fields:
        before, after = getattr(base, name), getattr(learned, name)
        if isinstance(after, float) and before != after:
            print(f"{name}: {after:.4g}, {after / before - 1:+.0%} of what is catalogued")
    if not dry_run:
        print(f"speed of {card}: saved to {path}")


def _print(runs: dict[Path, MeasuredRun]) -> None:
    from toolkit.memory.engines.ledger import PHASES
    from toolkit.units import format_bytes

    columns = ("peak", *PHASES, "context and NCCL", "measured")
    table = new_table(("run", "card", *columns), right=columns)
    for path, run in runs.items():
        errors = run.errors()
        table.add_row(
            str(path),
            f"{run.num_ranks} × {run.gpu}",
            *(f"{errors[name]:+.2%}" if name in errors else "–" for name in ("peak", *PHASES)),
            format_bytes(run.context_and_nccl_bytes),
            format_bytes(run.outside_bytes),
        )
    print_table(table)
