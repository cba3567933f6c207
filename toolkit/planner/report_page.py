"""A plan as one page of HTML that needs no network: to read on a phone or a desk, light or dark, to print and to share."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from toolkit.artifacts.contents import contents
from toolkit.errors import ToolkitError
from toolkit.planner.files import job_text, to_fill_in
from toolkit.planner.lines import counted, describe_kernels, describe_layout, format_hours, format_usd
from toolkit.planner.rows import COLUMNS, RIGHT, nearly_line
from toolkit.planning.plan import save_text
from toolkit.units import format_bytes
from toolkit.version import INSTALL, installed_version

if TYPE_CHECKING:
    from toolkit.planner.answer import Answer
    from toolkit.planner.rows import Row
    from toolkit.planning.plan import Plan

# Okabe and Ito's colours, which remain distinct for the colour-blind, and lighter ones for dark screens.
_PALETTE = (
    ("#0072B2", "#56A8E0"), ("#E69F00", "#F0B94A"), ("#009E73", "#3CC79C"), ("#CC79A7", "#E3A3C6"), ("#D55E00", "#F08A45"),
    ("#56B4E9", "#8CCBF2"), ("#8A8F00", "#C9CC4A"), ("#6A51A3", "#A593D6"), ("#7F7F7F", "#B0B0B0"), ("#3B4C5A", "#8FA3B3"),
)  # fmt: skip
# Order of the columns on the page: what decides stands first, where a phone shows it without scrolling.
_ORDER = ("#", "GPUs", "hours", "USD", "tokens/s", "GiB a card", "layout", "settings", "batch", "rent", "why")
_OTHERS = len(_PALETTE) - 1
_MOST_CAUSES = _OTHERS
_MOST_NODES = 8
_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 480, 320, 52, 30, 440, 272


def write_report(answer: Answer, row: Row, path: Path) -> None:
    """Write the page of a row.

    Raises:
        RunError: EMIT_UNWRITABLE.
    """
    save_text(path, report_html(answer, row))


def report_html(answer: Answer, row: Row) -> str:
    """Return the page of a row."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2").render(_context(answer, row))


def _context(answer: Answer, row: Row) -> dict[str, Any]:
    option = row.option
    step, plan = option.step, option.plan
    assert step is not None
    low, high = option.hours_range
    capacity = option.report.gpu_capacity_bytes
    phases, causes = _phases(row)
    offers = any(each.option.cluster.offer is not None for each in answer.rows)
    return {
        "title": f"Plan of {answer.question.model.name}",
        "headline": answer.headline,
        "version": installed_version(),
        "day": answer.today.isoformat(),
        "priced": answer.question.prices.dated if offers else "",
        "palette": _PALETTE,
        "what": _what(row),
        "layout": describe_layout(option.cluster, option.setting),
        "kernels": describe_kernels(option.setting),
        "batch": str(plan.settings.batch),
        "why": f"Chosen as {row.why}." if row.why else "",
        "figures": _figures(row),
        "chart": _chart(answer, row),
        "columns": [{"name": name, "right": name in RIGHT} for name in _ORDER],
        "rows": [_table_row(each, chosen=each is row) for each in answer.rows],
        "nearly": [nearly_line(each) for each in answer.nearly],
        "phases": phases,
        "causes": causes,
        "capacity": "?" if capacity is None else format_bytes(capacity),
        "required": format_bytes(option.report.required_bytes),
        "step": f"{step.seconds:.3g} s",
        "times": _times(row),
        "range": f"Foreseen within {step.low:.3g} and {step.high:.3g} s: {format_hours(low)} to {format_hours(high)} hours.",
        "host_bound": step.host_bound,
        "links": _links(row),
        "nodes": _nodes(plan),
        "more_nodes": max(0, plan.job.cluster.nodes - _MOST_NODES),
        "stages": plan.grid.pp,
        "files": _files(answer, row),
        "notes": _notes(answer, row),
    }


def _what(row: Row) -> str:
    cluster = row.option.cluster
    if cluster.offer is None:
        return f"Run on {cluster.name}"
    spot = ", spot" if cluster.spot else ""
    return f"Rent {cluster.name}: {cluster.offer.provider} {cluster.offer.offer.instance}{spot}"


def _figures(row: Row) -> list[tuple[str, str]]:
    option = row.option
    step, report = option.step, option.report
    assert step is not None
    low, high = option.hours_range
    price = option.cluster.usd_per_hour
    found = [(f"hours ({format_hours(low)} to {format_hours(high)})", format_hours(option.hours))]
    if option.usd is not None:
        found.append((f"USD, at {format_usd(price)} an hour", format_usd(option.usd)))
    found.append(("tokens a second", f"{option.tokens_per_second:,.0f}"))
    capacity = report.gpu_capacity_bytes
    found.append((f"a card, of {format_bytes(capacity or 0)}", format_bytes(report.required_bytes)))
    if step.model_flops_utilization is not None:
        found.append(("of the card's bf16 peak (MFU)", f"{step.model_flops_utilization:.0%}"))
    return found


def _table_row(row: Row, *, chosen: bool) -> dict[str, Any]:
    kind = "chosen" if chosen else "" if row.on_front else "behind"
    texts = dict(zip(COLUMNS, row.cells(), strict=True))
    cells = [{"text": texts[name], "right": name in RIGHT} for name in _ORDER]
    return {"kind": kind, "cells": cells}


def _chart(answer: Answer, row: Row) -> dict[str, Any] | None:
    """Return the chart of hours and price; None without two priced rows."""
    priced = [(each, each.option.hours, each.option.usd) for each in answer.rows if each.option.usd is not None]
    if len(priced) < 2:
        return None
    x_scale = _Scale([hours for _, hours, _ in priced], _LEFT, _RIGHT)
    y_scale = _Scale([usd for _, _, usd in priced if usd is not None], _BOTTOM, _TOP)
    dots = []
    front = []
    for each, hours, usd in priced:
        assert usd is not None
        x, y = x_scale.at(hours), y_scale.at(usd)
        if each.on_front:
            front.append(f"{x},{y}")
        dots.append(
            {
                "x": x,
                "y": y,
                "kind": "chosen" if each is row else "on" if each.on_front else "",
                "name": str(each.number),
                "title": f"{each.option.cluster.name}: {format_hours(hours)} hours, {format_usd(usd)} USD",
            }
        )
    return {
        "width": _WIDTH,
        "height": _HEIGHT,
        "left": _LEFT,
        "top": _TOP,
        "right": _RIGHT,
        "bottom": _BOTTOM,
        "x_ticks": x_scale.ticks(),
        "y_ticks": y_scale.ticks(),
        "front": " ".join(front),
        "dots": dots,
    }


class _Scale:
    """A logarithmic scale from values to pixels."""

    def __init__(self, values: Sequence[float], start: float, stop: float) -> None:
        low, high = math.log10(min(values)), math.log10(max(values))
        margin = max(0.08 * (high - low), 0.08)
        self._low, self._high, self._start, self._stop = low - margin, high + margin, start, stop

    def at(self, value: float) -> float:
        """Return the pixel of a value."""
        share = (math.log10(value) - self._low) / (self._high - self._low)
        return round(self._start + share * (self._stop - self._start), 1)

    def ticks(self) -> list[dict[str, Any]]:
        """Return round values within the scale: 1, 2 and 5 of each power of ten, or powers alone where these are many."""
        for steps in ((1, 2, 5), (1, 3), (1,)):
            powers = range(math.floor(self._low), math.ceil(self._high) + 1)
            values = [step * 10.0**power for power in powers for step in steps]
            inside = [value for value in values if self._low <= math.log10(value) <= self._high]
            if len(inside) <= 6:
                break
        return [{"at": self.at(value), "name": f"{value:,.10g}"} for value in inside]


def _phases(row: Row) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return a bar for each phase of the fullest rank, and the causes with their colours, the largest first."""
    report = row.option.report
    width = report.gpu_capacity_bytes or report.required_bytes
    fullest = report.fullest
    totals: Counter[str] = Counter()
    for phase in fullest.phases.values():
        for cause, size in phase.causes.items():
            totals[cause] = max(totals[cause], size)
    named = [cause for cause, size in totals.most_common() if size > 0.005 * width][:_MOST_CAUSES]
    colours = {cause: number for number, cause in enumerate(named)}
    bars = []
    for name, phase in fullest.phases.items():
        parts = [
            {"name": cause, "size": format_bytes(phase.causes[cause]), "share": round(100 * phase.causes[cause] / width, 2),
             "colour": colours[cause]}
            for cause in named
            if phase.causes.get(cause, 0) > 0
        ]  # fmt: skip
        rest = sum(size for cause, size in phase.causes.items() if cause not in colours)
        if rest > 0:
            share = round(100 * rest / width, 2)
            parts.append({"name": "others", "size": format_bytes(rest), "share": share, "colour": _OTHERS})
        bars.append({"name": name, "size": format_bytes(phase.allocated_bytes), "parts": parts})
    causes = [{"name": cause, "colour": colour} for cause, colour in colours.items()]
    return bars, [*causes, {"name": "others", "colour": _OTHERS}]


def _times(row: Row) -> list[dict[str, Any]]:
    step = row.option.step
    assert step is not None
    total = max(step.seconds, sum(step.parts.values()), 1e-12)
    parts = sorted(step.parts.items(), key=lambda part: -part[1])
    return [
        {"name": name.replace("_", " "), "size": f"{seconds * 1e3:,.1f} ms", "share": round(100 * seconds / total, 2)}
        for name, seconds in parts
        if seconds > 0.002 * total
    ]


def _links(row: Row) -> str:
    cluster = row.option.cluster
    gpu = cluster.gpu
    said = [counted(cluster.num_gpus, "card")]
    if cluster.gpus_per_node > 1 and gpu.link_kind and gpu.link_bandwidth_bytes_per_second:
        said.append(
            f"{gpu.link_kind} between the cards of a machine, {gpu.link_bandwidth_bytes_per_second / 1e9:.0f} GB/s each way"
        )
    network = None if cluster.offer is None else cluster.offer.offer.network_gbit_per_second
    if cluster.nodes > 1 and network is not None:
        said.append(f"{network:.0f} Gbit/s between machines")
    if cluster.host_memory_gib is not None:
        said.append(f"{cluster.host_memory_gib:.0f} GiB of RAM a machine")
    return "; ".join(said)


def _nodes(plan: Plan) -> list[dict[str, Any]]:
    grid, cluster = plan.grid, plan.job.cluster
    nodes = []
    for node in range(min(cluster.nodes, _MOST_NODES)):
        ranks = range(node * cluster.gpus_per_node, (node + 1) * cluster.gpus_per_node)
        groups: dict[tuple[int, int], list[dict[str, Any]]] = {}
        for rank in ranks:
            place = grid.coordinate(rank)
            axes = [
                f"{name}{index}"
                for name, index, size in (
                    ("pp", place.pp, grid.pp),
                    ("dp", place.dp, grid.dp),
                    ("tp", place.tp, grid.tp),
                )
                if size > 1
            ]
            groups.setdefault((place.pp, place.dp), []).append({"rank": rank, "place": " ".join(axes) or "alone"})
        nodes.append(
            {
                "name": f"node {node}",
                "groups": [{"colour": pp % _OTHERS, "gpus": gpus} for (pp, _), gpus in groups.items()],
            }
        )
    return nodes


def _files(answer: Answer, row: Row) -> list[dict[str, Any]]:
    """Return what to copy: the commands, the job, and the configurations that follow from it."""
    setting = row.option.setting
    commands = [f"{INSTALL}  # in a checkout of accelerator-toolkit"]
    if "liger" in (setting.loss, setting.kernels):
        commands.append("pip install liger-kernel")
    commands.append("toolkit validate planned.yaml --explain")
    if lacks := to_fill_in(row):
        commands += ["# before it can be trained, fill in planned.yaml:", *(f"#   {key}: {fix}" for key, fix in lacks)]
    commands.append("toolkit train planned.yaml")
    files = [
        {"title": "commands, on the machine", "text": "\n".join(commands) + "\n", "folded": False},
        {"title": "planned.yaml, the completed job", "text": job_text(row, answer.question), "folded": False},
    ]
    try:
        made = contents(row.plan, Path())
    except ToolkitError as error:
        return [*files, {"title": "why there are no configurations", "text": str(error), "folded": True}]
    shown = ("deepspeed.json", "accelerate.yaml", "training_arguments.json", "commands.sh")
    return files + [{"title": name, "text": made.texts[name], "folded": True} for name in shown if name in made.texts]


def _notes(answer: Answer, row: Row) -> list[str]:
    option = row.option
    assert option.step is not None
    rules = [str(rule) for rule in answer.learning_rate_rules]
    return list(dict.fromkeys([*answer.notes(), *option.step.assumptions, *option.report.assumptions, *rules]))
