"""Plots of an estimate and of a sweep, as PNG, SVG or a self-contained HTML page.

Drawn without pyplot, which keeps global state and looks for a display.
"""

from __future__ import annotations

import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.errors import SpecError
from toolkit.units import GIB, format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from toolkit.memory.report.report import CardReport

SUFFIXES = (".png", ".svg", ".html")

# Number of causes with a colour of their own; the rest are drawn as one.
MAX_CAUSES = 9
OTHER = "all else"

# Okabe and Ito's colours, which colour-blind readers can distinguish, and two greys.
_COLOURS = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#F0E442",
    "#8c6bb1",
    "#999999",
    "#cccccc",
)
_FITS, _TIGHT, _FAILS, _UNKNOWN = "#b7e1c0", "#f6e3a0", "#f4b6ae", "#e6e6e6"
_DPI = 150


def check_plot_path(path: Path) -> None:
    """Refuse a file that could not be written, before minutes are spent on its content.

    Raises:
        SpecError: PLOT_FORMAT, PLOT_FOLDER.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise SpecError.of(
            code="PLOT_FORMAT",
            key="--plot",
            message=f"plot={path}: {path.suffix or 'no suffix'} is not a supported format",
            fix=f"End the name in one of {', '.join(SUFFIXES)}",
        )
    if not path.parent.is_dir() or path.is_dir():
        raise SpecError.of(
            code="PLOT_FOLDER",
            key="--plot",
            message=f"plot={path}: " + ("it is a folder" if path.is_dir() else f"{path.parent} is not a folder"),
            fix="Name a file in a folder that exists",
        )


def plot_report(report: CardReport, path: Path, *, title: str = "") -> None:
    """Draw one bar per phase, stacked by cause, for the fullest rank, and the card's memory that is left for them.

    Raises:
        SpecError: PLOT_FORMAT, PLOT_FOLDER.
    """
    check_plot_path(path)
    figure = new_figure(width=9.0, height=5.2)
    axes = figure.subplots()
    rank = report.fullest
    phases = list(rank.phases)
    bottoms = [0.0] * len(phases)
    for colour, (cause, sizes) in zip(_COLOURS, _stacked(report).items(), strict=False):
        axes.bar(phases, sizes, bottom=bottoms, color=colour, label=cause, width=0.62, edgecolor="white", linewidth=0.4)
        bottoms = [bottom + size for bottom, size in zip(bottoms, sizes, strict=True)]
    for phase, height in zip(phases, bottoms, strict=True):
        bold = "bold" if phase == report.limiting_phase else "normal"
        axes.annotate(f"{height:.1f}", (phase, height), ha="center", va="bottom", fontsize=9, fontweight=bold)
    around = (report.allocator_slack_bytes + report.context_and_nccl_bytes) / GIB
    top = max(bottoms)
    if report.gpu_capacity_bytes is not None:
        capacity = report.gpu_capacity_bytes / GIB
        axes.axhline(capacity, color="black", linewidth=1.2, label=f"card, {capacity:.1f} GiB")
        usable = capacity - around
        axes.axhline(
            usable,
            color="black",
            linewidth=1.0,
            linestyle="--",
            label=f"less slack, context and NCCL, {usable:.1f} GiB",
        )
        top = max(top, capacity)
    axes.set_ylim(0, top * 1.08)
    axes.set_ylabel("GiB allocated")
    axes.set_title(title or f"Peak of each phase, rank {rank.rank}", loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=8)
    rows = [(cause, size) for cause, size in _sorted(rank.phases[report.limiting_phase].causes)]
    write_figure(figure, path, title=title or "Memory estimate", table=rows)


def plot_heat_map(
    path: Path,
    *,
    names: Sequence[str],
    values: Sequence[Sequence[Any]],
    cells: Mapping[tuple[Any, ...], Any],
    title: str,
) -> None:
    """Draw required memory over one or two swept keys, coloured by whether it fits.

    Args:
        names: Names of one or two keys; the first of two is on the vertical axis.
        values: Values of each key, in order.
        cells: For each combination (required GiB or None, whether it fits, whether it fits tightly).

    Raises:
        SpecError: PLOT_FORMAT, PLOT_FOLDER.
    """
    check_plot_path(path)
    downwards = list(values[0]) if len(names) == 2 else [None]
    across = list(values[-1])
    figure = new_figure(width=2.2 + 1.15 * len(across), height=1.7 + 0.62 * len(downwards))
    axes = figure.subplots()
    for row, first in enumerate(downwards):
        for column, second in enumerate(across):
            required, fits, tight = cells[(first, second) if len(names) == 2 else (second,)]
            colour = _UNKNOWN if required is None else _TIGHT if tight else _FITS if fits else _FAILS
            axes.add_patch(_square(column, row, colour))
            text = "–" if required is None else f"{required:.1f}"
            axes.text(column, row, text, ha="center", va="center", fontsize=10)
    axes.set_xlim(-0.5, len(across) - 0.5)
    axes.set_ylim(len(downwards) - 0.5, -0.5)
    axes.set_xticks(range(len(across)), [str(value) for value in across])
    axes.set_yticks(range(len(downwards)), ["" if value is None else str(value) for value in downwards])
    axes.set_xlabel(names[-1])
    axes.set_ylabel(names[0] if len(names) == 2 else "")
    axes.set_title(f"{title}\nGiB a card must have; green fits, yellow tightly", loc="left", fontsize=10)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    write_figure(figure, path, title=title, table=[])


def new_figure(*, width: float, height: float) -> Figure:
    """Return an empty figure; sizes are in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _square(column: int, row: int, colour: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor=colour, edgecolor="white", linewidth=2)


def _stacked(report: CardReport) -> dict[str, list[float]]:
    """Return GiB per phase for the largest causes of the fullest rank, and for the rest together."""
    phases = report.fullest.phases
    largest: dict[str, int] = {}
    for phase in phases.values():
        for cause, size in phase.causes.items():
            largest[cause] = max(largest.get(cause, 0), size)
    named = sorted(largest, key=lambda cause: -largest[cause])[:MAX_CAUSES]
    made = {cause: [phases[phase].causes.get(cause, 0) / GIB for phase in phases] for cause in named}
    if len(largest) > len(named):
        whole = [sum(phase.causes.values()) / GIB for phase in phases.values()]
        made[OTHER] = [total - sum(sizes) for total, sizes in zip(whole, zip(*made.values(), strict=True), strict=True)]
    return made


def _sorted(causes: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(causes.items(), key=lambda item: -item[1])


def write_figure(figure: Figure, path: Path, *, title: str, table: Sequence[tuple[str, int]]) -> None:
    """Write a figure in the format of its file suffix.

    Args:
        figure: Figure to write.
        path: File that `check_plot_path` accepts.
        title: Title of an HTML page.
        table: Names and bytes, listed below the figure on an HTML page.
    """
    if path.suffix.lower() == ".png":
        figure.savefig(path, dpi=_DPI)
        return
    svg = _svg(figure)
    if path.suffix.lower() == ".svg":
        path.write_text(svg, encoding="utf-8")
        return
    rows = "\n".join(
        f"<tr><td>{html.escape(cause)}</td><td>{html.escape(format_bytes(size))}</td></tr>" for cause, size in table
    )
    listed = f"<h2>Causes of the peak</h2>\n<table>\n{rows}\n</table>" if rows else ""
    path.write_text(
        f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{html.escape(title)}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }}
svg {{ width: 100%; height: auto; }}
td {{ padding: 0.1rem 1.5rem 0.1rem 0; }}
td + td {{ text-align: right; font-variant-numeric: tabular-nums; }}
</style>
</head>
<body>
<h1>{html.escape(title)}</h1>
{svg[svg.index("<svg") :]}
{listed}
</body>
</html>
""",
        encoding="utf-8",
    )


def _svg(figure: Figure) -> str:
    """Return the figure as SVG; the same estimate gives the same text, without a date and with the same ids."""
    import matplotlib

    drawn = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "toolkit"}):
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    return drawn.getvalue()
