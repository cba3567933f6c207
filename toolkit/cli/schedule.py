"""`toolkit schedule`: a step of a job's pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toolkit.cli.options import JobArgument, JsonOption, SetOption, read_plan


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(schedule)


def schedule(
    job: JobArgument,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw the whole step as .svg, .png or .html.", show_default=False),
    ] = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a step of a job's pipeline: which pipeline rank computes what and when, and the bubble.

    Example: `toolkit schedule job.yaml`, `toolkit schedule job.yaml --plot step.svg`,
    `toolkit schedule job.yaml --set train.gradient_accumulation_steps=32`

    JSON keys: schedule, pp, micro_batches, virtual_stages, bubble_fraction, makespan (in forward passes), stages (stage,
    pipeline_rank, chunk, layers: first and one past the last, in_flight), ranks (pipeline_rank, in_flight,
    bubble_fraction, passes: kind, chunk, micro_batch, start, end).
    """
    from toolkit.cli import schedule_chart

    schedule_chart.show(read_plan(job, overrides), plot=plot, as_json=as_json)
