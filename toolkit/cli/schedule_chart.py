"""A step of a job's pipeline as a chart, one row per pipeline rank."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.cli.output import new_table, print_json, print_table
from toolkit.cli.schedule_legend import LOOKS, label, row_name, title_of
from toolkit.errors import PlanError
from toolkit.pipeline_schedule import Durations, Span, Timeline, simulate, stage_layers

if TYPE_CHECKING:
    from rich.text import Text

    from toolkit.planning.plan import Plan

# A narrower chart would show colours alone; lines wrap instead.
_FEWEST_CELLS = 20
# Placeholder for the middle of a chart that is too wide, and the number of forward passes kept on each side.
_LEFT_OUT, _FEWEST_UNITS = " … ", 2
_SCALE = "Assumed: equal stages, a backward pass twice as long as a forward pass, and no communication time."


def show(plan: Plan, *, plot: Path | None, as_json: bool) -> None:
    """Print the schedule of a plan, and draw it into a file if one is given.

    Raises:
        PlanError: PIPELINE_UNUSED, if the job has no pipeline.
        SpecError: PLOT_FORMAT, PLOT_FOLDER.
    """
    timeline = timeline_of(plan)
    if plot is not None:
        from toolkit.cli.schedule_picture import draw

        draw(timeline, plot)
    if as_json:
        print_json(as_dict(timeline, plan.settings.partition))
        return
    _print(timeline, plan.settings.partition)
    if plot is not None:
        print(f"drawn: {plot}")


def timeline_of(plan: Plan) -> Timeline:
    """Simulate a step of a plan's pipeline, with stages of equal cost.

    Raises:
        PlanError: PIPELINE_UNUSED, if the job has no pipeline.
    """
    pp = plan.job.parallel.pipeline
    if pp == 1:
        raise PlanError.of(
            code="PIPELINE_UNUSED",
            key="parallel.pipeline",
            message="pipeline=1: a job without stages has no schedule",
            fix="Set parallel.pipeline above 1",
        )
    return simulate(plan.schedule, Durations())


def chart(timeline: Timeline, *, width: int | None, fill: str, most: int | None = None) -> list[Text]:
    """Return one line per pipeline rank, with time from left to right.

    Args:
        timeline: Timeline to draw.
        width: Cells per line. None: as many as all labels need, without the middle if that is more than `most`.
        fill: Character after a label up to the end of its instruction: a blank if colours distinguish instructions.
        most: Largest width where labels set it, in cells; no limit if None.
    """
    from rich.text import Text

    schedule = timeline.schedule
    names = [f"{row_name(rank)} " for rank in range(schedule.pp)]
    margin = max(map(len, names))
    if width is None:
        longest = max(len(text) for spans in timeline.spans for _, text in _labelled(timeline, spans))
        shortest = min(span.end - span.start for spans in timeline.spans for span in spans)
        cells_per_unit = (longest + 1) / shortest
        if most is not None and margin + timeline.makespan * cells_per_unit > most:
            lines = chart(timeline, width=None, fill=fill)
            return _without_middle(lines, margin=margin, cells_per_unit=round(cells_per_unit), most=most)
    else:
        cells_per_unit = max(_FEWEST_CELLS, width - margin) / timeline.makespan
    lines = []
    for name, spans in zip(names, timeline.spans, strict=True):
        line = Text(name.ljust(margin), no_wrap=True)
        for span, text in _labelled(timeline, spans):
            start, stop = (round(edge * cells_per_unit) for edge in (span.start, span.end))
            line.append(" " * (start + margin - len(line)))
            # Leave one cell between neighbours if letters alone distinguish them.
            shown = text if len(text) < stop - start else text[1:] if len(text) <= stop - start else ""
            line.append(shown.ljust(stop - start, fill), LOOKS[type(span.instruction)][2])
        lines.append(line)
    return lines


def _without_middle(lines: list[Text], *, margin: int, cells_per_unit: int, most: int) -> list[Text]:
    """Leave out the steady state of a step, where each rank alternates one forward and one backward pass."""
    from rich.text import Text

    units = max(2 * _FEWEST_UNITS, (most - margin - len(_LEFT_OUT)) // cells_per_unit)
    before, after = margin + (units + 1) // 2 * cells_per_unit, units // 2 * cells_per_unit
    whole = max(map(len, lines))
    shown = []
    for line in lines:
        line.pad_right(whole - len(line))
        part = line[:before] + Text(_LEFT_OUT) + line[whole - after :]
        part.rstrip()
        shown.append(part)
    return shown


def _labelled(timeline: Timeline, spans: tuple[Span, ...]) -> Iterator[tuple[Span, str]]:
    with_chunk = timeline.schedule.virtual_stages > 1
    for span in spans:
        yield span, label(span.instruction, with_chunk=with_chunk)


def as_dict(timeline: Timeline, partition: tuple[int, ...]) -> dict[str, Any]:
    """Return what is shown as a JSON object."""
    schedule = timeline.schedule
    layers = stage_layers(partition)
    return {
        "schedule": schedule.name,
        "pp": schedule.pp,
        "micro_batches": schedule.micro_batches,
        "virtual_stages": schedule.virtual_stages,
        "bubble_fraction": timeline.bubble_fraction,
        "makespan": timeline.makespan,
        "stages": [
            {
                "stage": stage,
                "pipeline_rank": schedule.place(stage)[0],
                "chunk": schedule.place(stage)[1],
                "layers": [run.start, run.stop],
                "in_flight": schedule.peak_in_flight_of_stage(stage),
            }
            for stage, run in enumerate(layers)
        ],
        "ranks": [
            {
                "pipeline_rank": rank,
                "in_flight": schedule.peak_in_flight(rank),
                "bubble_fraction": timeline.bubble_fraction_of(rank),
                "passes": [
                    {
                        "kind": LOOKS[type(span.instruction)][1],
                        "chunk": span.instruction.chunk,
                        "micro_batch": span.instruction.micro_batch,
                        "start": span.start,
                        "end": span.end,
                    }
                    for span in spans
                ],
            }
            for rank, spans in enumerate(timeline.spans)
        ],
    }


def _print(timeline: Timeline, partition: tuple[int, ...]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    coloured = console.color_system is not None and console.is_terminal
    print(title_of(timeline))
    print()
    width, fill = (console.width, " ") if coloured else (None, "-")
    lines = chart(timeline, width=width, fill=fill, most=console.width)
    for line in lines:
        console.print(line)
    if any(_LEFT_OUT in line.plain for line in lines):
        print("The steady state is abbreviated: --plot FILE draws the whole step.")
    kinds = [kind for kind in LOOKS if any(isinstance(one, kind) for order in timeline.schedule.order for one in order)]
    legend = Text("\n")
    for kind in kinds:
        letter, meaning, style, _ = LOOKS[kind]
        legend.append(f" {letter} ", style).append(f" {meaning}   ")
    console.print(legend)
    print(f"A letter's number is the micro-batch{_chunk_note(timeline)}. {_SCALE}\n")
    sys.stdout.flush()
    print_table(_table(timeline, partition))


def _chunk_note(timeline: Timeline) -> str:
    return ", and the number after the dot is the pipeline rank's chunk" if timeline.schedule.virtual_stages > 1 else ""


def _table(timeline: Timeline, partition: tuple[int, ...]) -> Any:
    schedule = timeline.schedule
    header = ("stage", "pipeline rank", "layers", "micro-batches in flight")
    table = new_table(header, right=header)
    for stage, run in enumerate(stage_layers(partition)):
        cells = (
            stage,
            schedule.place(stage)[0],
            str(run.start) if len(run) == 1 else f"{run.start}-{run.stop - 1}",
            schedule.peak_in_flight_of_stage(stage),
        )
        table.add_row(*map(str, cells))
    return table
