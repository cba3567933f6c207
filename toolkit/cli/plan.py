"""`toolkit plan`: what to rent for a job, and what to run on it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.cli.options import JsonOption, OptionalJobArgument, SetOption
from toolkit.cli.output import new_table, print_json, print_table
from toolkit.errors import ToolkitError
from toolkit.planner import DEFAULT_SECONDS

if TYPE_CHECKING:
    from toolkit.planner.answer import Answer
    from toolkit.planner.search import Progress


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(plan)


def plan(
    job: OptionalJobArgument = None,
    overrides: SetOption = None,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="A model in place of a job file.", show_default=False)
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(metavar="100M", help="Tokens of one pass over the data.", show_default=False)
    ] = None,
    epochs: Annotated[
        float | None, typer.Option(metavar="N", help="Passes over the data; the job's by default.", show_default=False)
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option("--sequence-length", metavar="N", min=1, help="As in the job.", show_default=False)
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            metavar="full,lora", help="As in the job; of several the first that has a plan.", show_default=False
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option("--train-batch-size", metavar="N", min=1, help="Global batch, as in the job.", show_default=False),
    ] = None,
    budget_usd: Annotated[
        float | None, typer.Option("--budget-usd", metavar="USD", help="Most that it may cost.", show_default=False)
    ] = None,
    deadline_hours: Annotated[
        float | None,
        typer.Option("--deadline-hours", metavar="HOURS", help="Longest that it may take.", show_default=False),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            metavar="all|A,B", help="Cards to choose among, in place of the job's cluster.", show_default=False
        ),
    ] = None,
    max_gpus: Annotated[
        int | None,
        typer.Option("--max-gpus", metavar="N", help="Most cards of a cluster; 64 by default.", show_default=False),
    ] = None,
    prices: Annotated[
        str | None,
        typer.Option(metavar="FILE_OR_URL", help="Prices in place of the toolkit's snapshot.", show_default=False),
    ] = None,
    spot: Annotated[bool, typer.Option("--spot", help="Machines that may be taken away, at their price.")] = False,
    liger: Annotated[
        bool | None,
        typer.Option("--liger/--no-liger", help="Whether Liger's kernels can be installed there.", show_default=False),
    ] = None,
    compiled: Annotated[
        bool | None,
        typer.Option(
            "--compiled/--no-compiled",
            help="Whether to try compiled layers, which takes longest. By default on the job's own cluster, and where the recommended row "
            "is written.",
            show_default=False,
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option(metavar="S", min=0.1, help="Computing time after which the search ends with what it has.")
    ] = DEFAULT_SECONDS,
    row: Annotated[
        int | None, typer.Option(metavar="N", help="Row that --write, --emit and --report take.", show_default=False)
    ] = None,
    write: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the completed job of a row.", show_default=False)
    ] = None,
    emit: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write its configurations and commands, too.", show_default=False),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Write one page to read and share.", show_default=False)
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace files of --write, --emit and --report that exist.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Say which GPUs to rent for a job and the fastest settings on them, by exact estimates of memory, time and price.

    A job without a cluster is planned on every card that has a price; one with a cluster on that, unless --gpus is given. What
    the job says is kept, the global batch too, and only settings that keep its numbers are chosen.

    Example: `toolkit plan job.yaml`, `toolkit plan --model llama-3.1-8b --tokens 100M --sequence-length 4096 --budget-usd 50`

    JSON keys: question, recommended (number of a row), rows (row, on_front, why, cluster, grid, settings, batch,
    peak_allocated_bytes, required_bytes, gpu_capacity_bytes, host_bytes_per_node, tight, step_seconds, tokens_per_second,
    model_flops_utilization, host_bound, measured_card, step_parts, hours, hours_low, hours_high, usd, assumptions), nearly, failures, search,
    other_methods, learning_rate_rules, notes, written.
    """
    from toolkit.cli.estimate_session import EstimateSession
    from toolkit.cli.plan_files import PlanFiles

    files = PlanFiles(write=write, emit=emit, report=report, overwrite=overwrite)
    files.check(job)
    # The search shows its own progress.
    with EstimateSession(as_json=True, interrupted="Interrupted; nothing was written.") as session:
        from toolkit.planner.files import to_fill_in
        from toolkit.planner.make import answer_first, ask
        from toolkit.planner.question import read_methods

        asked = partial(
            ask,
            job,
            overrides=overrides or (),
            model=model,
            tokens=tokens,
            epochs=epochs,
            sequence_length=sequence_length,
            train_batch_size=batch,
            gpus=gpus,
            max_gpus=max_gpus,
            budget_usd=budget_usd,
            deadline_hours=deadline_hours,
            prices=prices,
            spot=spot,
            liger=liger,
            # Rows keep their numbers: whoever names one has read them in a table without compiled layers.
            compiled=True if compiled is None and row is None and files else compiled,
        )
        with _naming_option(model):
            questions = [asked(method=each) for each in read_methods(method)]
            with session.estimating() as estimator, _watching(as_json=as_json) as watch:
                found = answer_first(questions, seconds=seconds, estimator=estimator, watch=watch)
    if not as_json:  # shown whatever becomes of the files
        _print(found)
    chosen = found.recommended if row is None else found.row(row)
    written = files.save(found, chosen)
    if as_json:
        print_json(found.to_dict() | {"written": [str(path) for path in written]})
        return
    for path in written:
        print(f"row {chosen.number} written to {path}")
    if written and (lacks := to_fill_in(chosen)):
        print(f"before `toolkit train`, fill in {' and '.join(key for key, _ in lacks)}: the job says how")
    if not written:
        print(
            "--write planned.yaml writes the completed job of the recommended row, --row N of another; --report page.html a page"
        )


@contextmanager
def _naming_option(model: str | None) -> Iterator[None]:
    """Let the problems of a model that --model names name this option, and no key of a job file."""
    try:
        yield
    except ToolkitError as error:
        if model is None:
            raise
        problems = [
            replace(each, key="--model") if each.key in ("model", "model.name") else each for each in error.problems
        ]
        raise type(error)(*problems) from None


@contextmanager
def _watching(*, as_json: bool) -> Iterator[Callable[[Progress], None]]:
    """Yield a function that shows the progress of a search on a terminal."""
    if as_json or not sys.stderr.isatty():
        yield lambda progress: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True, markup=False, emoji=False), transient=True) as bar:
        task = bar.add_task("loading torch and transformers", total=None)

        def show(progress: Progress) -> None:
            best = progress.best
            so_far = "" if best is None else f"; best so far {best.cluster.name}, {best.hours:.3g} h"
            bar.update(
                task,
                total=progress.clusters,
                completed=progress.decided,
                description=f"{progress.doing} ({progress.traces} traces{so_far})",
            )

        yield show


def _print(found: Answer) -> None:
    from rich.text import Text

    from toolkit.planner.rows import COLUMNS, RIGHT, nearly_line

    print(found.headline)
    rows = [row.cells() for row in found.rows]
    kept = [index for index in range(len(COLUMNS)) if any(cells[index] for cells in rows)]
    table = new_table([COLUMNS[index] for index in kept], right=RIGHT)
    for row, cells in zip(found.rows, rows, strict=True):
        style = "bold" if row is found.recommended else "" if row.on_front else "dim"
        table.add_row(*(Text(cells[index], style=style) for index in kept))
    print_table(table)
    print(f"recommended: row {found.recommended.number}, {found.recommendation}")
    for option in found.nearly:
        print(f"almost fits: {nearly_line(option)}")
    for line in (*map(str, found.learning_rate_rules), *found.notes()):
        print(line)
