"""Ranks, layers, nodes and links as an image: PNG, SVG or an HTML page.

A column is a pipeline stage, a row a replica of the model, and a box a tensor-parallel group on one node.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from toolkit.memory.report.figures import check_plot_path, new_figure, write_figure
from toolkit.pipeline_schedule import StageSpec
from toolkit.topology.grid import Coordinate
from toolkit.topology.links import Boundary
from toolkit.topology.placement import Placement
from toolkit.topology.table import name_ranks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# More rows or columns than these are omitted in the middle, where they repeat a pattern, to keep the image one page.
_MOST_ROWS, _MOST_COLUMNS = 16, 16
# Inches: column width, row height, margins, and the least width that fits the lines of text below.
_COLUMN, _ROW, _AROUND_WIDTH, _AROUND_HEIGHT, _NARROWEST = 1.75, 0.62, 1.2, 2.0, 6.5
# Rows per line of text, letters that fit a column heading, and a box's shares of its cell.
_LINE, _HEAD_LETTERS = 0.25, 26
_BOX_WIDTH, _BOX_HEIGHT = 0.7, 0.66
# Pale forms of Okabe and Ito's colours; neighbouring nodes differ.
_NODES = ("#BBDDEE", "#F6DDA6", "#B0DFCF", "#E8CCDA", "#F2C5A5", "#F6F1B3", "#C9CCE6", "#DDDDDD")
_INSIDE, _NETWORK = "#555555", "#D55E00"


def draw(placement: Placement, held: Sequence[StageSpec], links: Sequence[Boundary], path: Path) -> None:
    """Draw a grid on its nodes.

    Args:
        placement: Placement of the ranks on nodes.
        held: Layers of each pipeline rank; empty without a job.
        links: Stage boundaries with links, as `boundaries` returns them.
        path: Path of the file to write.

    Raises:
        SpecError: PLOT_FORMAT, PLOT_FOLDER.
    """
    check_plot_path(path)
    grid = placement.grid
    columns, rows = _shown(grid.pp, _MOST_COLUMNS), _shown(grid.dp, _MOST_ROWS)
    heads = [_head(grid.pp, pp, held) for pp in columns]
    head_rows = _LINE * max(head.count("\n") + 1 for head in heads)
    figure = new_figure(
        width=max(_NARROWEST, _COLUMN * len(columns) + _AROUND_WIDTH),
        height=_ROW * (len(rows) + head_rows) + _AROUND_HEIGHT,
    )
    axes = figure.subplots()
    for x, pp in enumerate(columns):
        _write(axes, x, -0.45, heads[x], at="bottom")
        for y, dp in enumerate(rows):
            _cell(axes, placement, x, y, pp, dp)
    for x, pp in enumerate(columns):
        for link in links:
            if link.start == pp:
                _link(axes, placement, x, columns, rows, link)
    axes.set_xlim(-0.6, len(columns) - 0.4)
    axes.set_ylim(len(rows) - 0.4, -0.55 - head_rows)
    axes.set_xticks([])
    axes.set_yticks(range(len(rows)), ["" if dp is None else f"dp {dp}" for dp in rows])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    _legend(axes, links)
    axes.set_title(title_of(placement), loc="left", fontsize=11)
    axes.set_xlabel("\n".join(map(str, placement.describe())), loc="left", fontsize=8, linespacing=1.5)
    write_figure(figure, path, title=title_of(placement), table=[])


def title_of(placement: Placement) -> str:
    """Return a line with the sizes."""
    grid, nodes = placement.grid, placement.num_nodes
    machines = "1 node" if nodes == 1 else f"{nodes} nodes"
    sizes = f"pipeline {grid.pp} × data {grid.dp} × tensor {grid.tp}"
    return f"{sizes} = {grid.world_size} ranks on {machines} of {placement.gpus_per_node}"


def _shown(count: int, most: int) -> list[int | None]:
    """Return the indices that are drawn, and None for those that are left out.

    >>> _shown(3, 5), _shown(9, 5)
    ([0, 1, 2], [0, 1, 2, None, 8])
    """
    return list(range(count)) if count <= most else [*range(most - 2), None, count - 1]


def _head(pp_size: int, pp: int | None, held: Sequence[StageSpec]) -> str:
    if pp is None:
        return f"{pp_size - _MOST_COLUMNS + 1} more"
    if not held:
        return f"pp {pp}"
    return "\n".join((f"pp {pp}", *wrap(str(held[pp]), _HEAD_LETTERS)))


def _cell(axes: Axes, placement: Placement, x: int, y: int, pp: int | None, dp: int | None) -> None:
    grid = placement.grid
    if pp is None or dp is None:
        left_out = f"{grid.dp - _MOST_ROWS + 1} more" if dp is None and x == 0 else "…"
        _write(axes, x, y, left_out)
        return
    from matplotlib.patches import Rectangle

    group = grid.group_of(grid.rank(Coordinate(pp=pp, dp=dp, tp=0)), "tp")
    node = placement.node(group[0])
    corner = (x - _BOX_WIDTH / 2, y - _BOX_HEIGHT / 2)
    colour = _NODES[node % len(_NODES)]
    axes.add_patch(Rectangle(corner, _BOX_WIDTH, _BOX_HEIGHT, facecolor=colour, edgecolor=_INSIDE, linewidth=0.8))
    _write(axes, x, y, f"{name_ranks(group)}\nnode {node}")


def _link(
    axes: Axes, placement: Placement, x: int, columns: Sequence[int | None], rows: Sequence[int | None], link: Boundary
) -> None:
    """Draw a boundary's links in each row: to the right neighbour, or from the last column back to the first."""
    grid, goes_round = placement.grid, link.stop == 0
    if not goes_round and columns[x + 1] is None:
        return
    for y, dp in enumerate(rows):
        if dp is None:
            continue
        ends = [placement.node(grid.rank(Coordinate(pp=pp, dp=dp, tp=0))) for pp in (link.start, link.stop)]
        colour = _INSIDE if ends[0] == ends[1] else _NETWORK
        if goes_round:
            below = y + 0.44
            path = [(x, y + _BOX_HEIGHT / 2), (x, below), (0, below)]
            axes.plot(*zip(*path, strict=True), color=colour, linewidth=1.0)
            _arrow(axes, (0, below), (0, y + _BOX_HEIGHT / 2), colour)
        else:
            _arrow(axes, (x + _BOX_WIDTH / 2, y), (x + 1 - _BOX_WIDTH / 2, y), colour)


def _arrow(axes: Axes, start: tuple[float, float], stop: tuple[float, float], colour: str) -> None:
    style = {"arrowstyle": "-|>", "color": colour, "linewidth": 1.2, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 8}
    axes.annotate("", xy=stop, xytext=start, arrowprops=style)


def _legend(axes: Axes, links: Sequence[Boundary]) -> None:
    from matplotlib.lines import Line2D

    crossing = [link.over_network > 0 for link in links]
    staying = [link.over_network < link.num_links for link in links]
    shown: list[Any] = [
        Line2D([], [], color=colour, label=label)
        for colour, label, present in (
            (_INSIDE, "hidden states inside a node", any(staying)),
            (_NETWORK, "hidden states over the network", any(crossing)),
        )
        if present
    ]
    if shown:
        axes.legend(handles=shown, loc="upper right", bbox_to_anchor=(1.0, 0.0), frameon=False, fontsize=8)


def _write(axes: Axes, x: float, y: float, text: str, *, at: str = "center") -> None:
    axes.text(x, y, text, ha="center", va=at, fontsize=8, linespacing=1.35)
