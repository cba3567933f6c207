"""The chart of a schedule as an image: PNG, SVG or an HTML page."""

from __future__ import annotations

from pathlib import Path

from toolkit.cli.schedule_legend import LOOKS, label, row_name, title_of
from toolkit.memory.report.figures import check_plot_path, new_figure, write_figure
from toolkit.pipeline_schedule import Timeline

# Inches: height of a row, margins, width of one unit of time, and least and greatest width of the chart.
_ROW, _AROUND, _UNIT, _NARROWEST, _WIDEST = 0.36, 1.3, 0.16, 8.0, 40.0
# With more passes than this the labels would overlap, and take longer to draw than the rest of the image.
_MOST_LABELS = 3000


def draw(timeline: Timeline, path: Path) -> None:
    """Draw one bar per pass and one row per pipeline rank; later chunks of a rank are paler.

    Raises:
        SpecError: PLOT_FORMAT, PLOT_FOLDER.
    """
    check_plot_path(path)
    schedule = timeline.schedule
    width = min(_WIDEST, max(_NARROWEST, _UNIT * timeline.makespan + _AROUND))
    figure = new_figure(width=width, height=_ROW * schedule.pp + _AROUND)
    axes = figure.subplots()
    labelled = sum(map(len, timeline.spans)) <= _MOST_LABELS
    for kind, (_, meaning, _, colour) in LOOKS.items():
        of_kind = [
            (rank, span)
            for rank, spans in enumerate(timeline.spans)
            for span in spans
            if isinstance(span.instruction, kind)
        ]
        for chunk in range(schedule.virtual_stages):
            chosen = [(rank, span) for rank, span in of_kind if span.instruction.chunk == chunk]
            if not chosen:
                continue
            axes.barh(
                [rank for rank, _ in chosen],
                [span.end - span.start for _, span in chosen],
                left=[span.start for _, span in chosen],
                height=0.86,
                color=colour,
                alpha=1.0 - 0.6 * chunk / schedule.virtual_stages,
                edgecolor="white",
                linewidth=0.5,
                label=meaning if chunk == 0 else None,
            )
        for rank, span in of_kind if labelled else ():
            text = label(span.instruction, with_chunk=schedule.virtual_stages > 1)[1:]
            axes.text((span.start + span.end) / 2, rank, text, ha="center", va="center", fontsize=6, clip_on=True)
    axes.set_yticks(range(schedule.pp), [row_name(rank) for rank in range(schedule.pp)])
    axes.set_xlim(0, timeline.makespan)
    axes.set_ylim(schedule.pp - 0.5, -0.5)
    axes.set_xlabel("time, in forward passes of one stage")
    axes.set_title(title_of(timeline), loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.55 / schedule.pp - 0.12), ncols=4, frameon=False, fontsize=8
    )
    write_figure(figure, path, title=title_of(timeline), table=[])
