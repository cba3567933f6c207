"""Parts of an answer in words and as plain text."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from toolkit.planner.bounds import Setting
from toolkit.planner.clusters import Candidate

_MOST_WIDTH = 34


def describe_layout(cluster: Candidate, setting: Setting) -> str:
    """Return ranks, stage, offload and what ranks have of experts in words: `dp 8, ZeRO-2`."""
    dp_size = cluster.num_gpus // (setting.tensor * setting.pipeline)
    sizes = (("pp", setting.pipeline), ("dp", dp_size), ("tp", setting.tensor))
    axes = [f"{name} {size}" for name, size in sizes if size > 1]
    share = "" if setting.offload_ratio == 1 else f" {setting.offload_ratio:.0%}"
    offload = "" if setting.offload == "none" else f", {setting.offload}{share}"
    experts = ", whole experts" if setting.experts == "whole" else ""
    return f"{' × '.join(axes) or 'one card'}, ZeRO-{setting.stage}{offload}{experts}"


def describe_kernels(setting: Setting) -> str:
    """Return what computes the layers and the loss, and what is recomputed."""
    layers = "compiled layers" if setting.compiled else f"{setting.kernels} kernels"
    shares = {0.0: "no recomputation", 1.0: "all layers recomputed"}
    recomputed = shares.get(setting.checkpointing, f"{setting.checkpointing:.0%} of the layers recomputed")
    layers += " over whole experts" if setting.experts == "whole" else ""
    return f"{layers}, {setting.loss} loss, {recomputed}"


def format_hours(hours: float) -> str:
    """Return hours with three significant digits.

    >>> format_hours(0.04217), format_hours(12.345), format_hours(1234.5)
    ('0.0422', '12.3', '1,234')
    """
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}"


def format_usd(usd: float | None) -> str:
    """Return a price in cents, or in whole dollars from a thousand."""
    if usd is None:
        return "–"
    return f"{usd:,.0f}" if usd >= 1000 else f"{usd:.2f}"


def enough_usd(usd: float | None) -> str:
    """Return the least budget, in cents or whole dollars, that a price keeps: rounded up, where `format_usd` may round down.

    >>> enough_usd(12.341), enough_usd(12.34), enough_usd(1234.2)
    ('12.35', '12.34', '1235')
    """
    if usd is None:
        return "–"
    steps = 1 if usd >= 1000 else 100
    return f"{math.ceil(round(usd * steps, 6)) / steps:.{0 if steps == 1 else 2}f}"


def counted(number: float, noun: str) -> str:
    """Return a number with its noun.

    >>> counted(1, "card"), counted(8, "card"), counted(0.5, "hour"), counted(2, "pass")
    ('1 card', '8 cards', '0.5 hours', '2 passes')
    """
    ending = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number:g} {noun}{ending}"


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> list[str]:
    """Return a table as lines of plain text, with long cells wrapped."""
    wrapped = [[textwrap.wrap(cell, _MOST_WIDTH) or [""] for cell in row] for row in rows]
    kept = [index for index in range(len(columns)) if any(row[index] != [""] for row in wrapped)]
    widths = {
        index: max([len(columns[index]), *(len(line) for row in wrapped for line in row[index])]) for index in kept
    }

    def line(cells: Sequence[str]) -> str:
        placed = [
            cell.rjust(widths[index]) if columns[index] in right else cell.ljust(widths[index])
            for index, cell in zip(kept, cells, strict=True)
        ]
        return "  ".join(placed).rstrip()

    lines = [line([columns[index] for index in kept]), "  ".join("─" * widths[index] for index in kept)]
    for row in wrapped:
        height = max(len(row[index]) for index in kept)
        lines += [line([(row[index] + [""] * height)[at] for index in kept]) for at in range(height)]
    return lines
