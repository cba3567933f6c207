"""The rows of an answer: plans to choose from, and clusters that almost hold the job."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolkit.planner.lines import describe_kernels, describe_layout, format_hours, format_usd
from toolkit.planner.options import Option
from toolkit.units import GIB, format_bytes

if TYPE_CHECKING:
    from toolkit.config.job import Job
    from toolkit.planning.plan import Plan

COLUMNS = ("#", "GPUs", "rent", "layout", "settings", "batch", "GiB a card", "tokens/s", "hours", "USD", "why")
RIGHT = ("#", "GiB a card", "tokens/s", "hours", "USD")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Row:
    """One plan to choose from; `print` shows it in three lines, a notebook as a table of one row.

    Args:
        number: Its number in the table, from 1.
        option: Cluster, settings and exact figures.
        on_front: Whether no other row beats it in both hours and price.
        why: What speaks for it, in words.
    """

    number: int
    option: Option
    on_front: bool
    why: str

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.option.plan

    @property
    def job(self) -> Job:
        """The job, completed by the cluster and the chosen settings."""
        return self.option.plan.job

    @property
    def line(self) -> str:
        """Cluster, speed, hours and price, and what speaks for it."""
        return f"{self.option.cluster.name}: {self.option.figures}; {self.why}"

    def __str__(self) -> str:
        cells = dict(zip(COLUMNS, self.cells(), strict=True))
        rent = f"{cells['rent']}; " if cells["rent"] else ""
        return (
            f"row {self.number}, {self.line}\n"
            f"  {rent}{cells['layout']}; {cells['settings']}\n"
            f"  batch {self.option.plan.settings.batch}; {cells['GiB a card']} GiB a card"
        )

    def __repr__(self) -> str:
        return f"row {self.number}, {self.line}"

    def _repr_html_(self) -> str:
        return html_table([self])

    def cells(self) -> tuple[str, ...]:
        """Return the cells of the table, as `COLUMNS` names them."""
        option = self.option
        cluster, batch = option.cluster, option.plan.settings.batch
        offer = cluster.offer
        capacity = cluster.gpu.memory_bytes
        needs = f"{option.report.required_bytes / GIB:.1f}"
        return (
            str(self.number),
            cluster.name,
            "" if offer is None else f"{offer.provider} {offer.offer.instance}{', spot' if cluster.spot else ''}",
            describe_layout(cluster, option.setting),
            describe_kernels(option.setting),
            f"{batch.micro} × {batch.accumulation} × {batch.dp_size}",
            needs if capacity is None else f"{needs} of {capacity / GIB:.0f}",
            f"{option.tokens_per_second:,.0f}",
            format_hours(option.hours),
            format_usd(option.usd),
            self.why,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the row as a JSON object."""
        option, step = self.option, self.option.step
        assert step is not None
        settings, report = option.plan.settings, option.report
        low, high = option.hours_range
        return {
            "row": self.number,
            "on_front": self.on_front,
            "why": self.why,
            "cluster": option.cluster.to_dict(),
            "grid": {"pp": option.plan.grid.pp, "dp": option.plan.grid.dp, "tp": option.plan.grid.tp},
            "settings": setting_values(option),
            "batch": {
                "train": settings.batch.train,
                "micro": settings.batch.micro,
                "accumulation": settings.batch.accumulation,
                "dp_size": settings.batch.dp_size,
            },
            "peak_allocated_bytes": report.peak_allocated_bytes,
            "required_bytes": report.required_bytes,
            "gpu_capacity_bytes": report.gpu_capacity_bytes,
            "host_bytes_per_node": report.host.bytes_per_node,
            "tight": report.tight,
            "step_seconds": step.seconds,
            "tokens_per_second": option.tokens_per_second,
            "model_flops_utilization": step.model_flops_utilization,
            "host_bound": step.host_bound,
            "measured_card": step.measured,
            "step_parts": dict(step.parts),
            "hours": option.hours,
            "hours_low": low,
            "hours_high": high,
            "usd": option.usd,
            "assumptions": [*step.assumptions, *report.assumptions],
        }


def html_table(rows: Sequence[Row], *, bold: Row | None = None) -> str:
    """Return rows as a table of a notebook."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in COLUMNS)
    body = ""
    for row in rows:
        style = ' style="font-weight:bold"' if row is bold else ""
        body += f"<tr{style}>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row.cells()) + "</tr>"
    return f"<table><tr>{head}</tr>{body}</table>"


def setting_values(option: Option) -> dict[str, Any]:
    """Return the settings of an option by dotted key of the job."""
    return option.setting.values() | {"parallel.zero_stage": option.plan.settings.zero_stage}


def nearly_dict(option: Option) -> dict[str, Any]:
    """Return a cluster that almost holds the job as a JSON object."""
    return {
        "cluster": option.cluster.to_dict(),
        "settings": setting_values(option),
        "required_bytes": option.report.required_bytes,
        "lacking_bytes": option.lacking_bytes,
        "host_bytes_per_node": option.report.host.bytes_per_node,
        "lacking_host_bytes": option.lacking_host_bytes,
    }


def nearly_line(option: Option) -> str:
    """Return what a cluster lacks, in one line."""
    lacks = []
    if option.lacking_bytes:
        lacks.append(f"{format_bytes(option.lacking_bytes)} a card")
    if option.lacking_host_bytes:
        lacks.append(f"{format_bytes(option.lacking_host_bytes)} of RAM a machine")
    where = f"{describe_layout(option.cluster, option.setting)}, {describe_kernels(option.setting)}"
    return f"{option.cluster.name} lacks {' and '.join(lacks) or 'nothing'} ({where})"
