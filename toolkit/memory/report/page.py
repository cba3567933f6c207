"""An estimate as a page: of plain text for a terminal, of tables with bars for a notebook."""

from __future__ import annotations

import html
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeGuard

from toolkit.units import format_bytes

if TYPE_CHECKING:
    from toolkit.memory.report.report import CardReport, MemoryReport, PhaseReport

# Causes below this share of the peak are summed up in one line.
LEAST_SHARE = 0.005

Fields = list[tuple[str, str]]  # names and values, to be printed as two columns


def text_page(report: CardReport) -> str:
    """Return verdict, peaks by phase, causes of the highest, requirements and assumptions, as lines of text."""
    return "\n".join(_lines(report))


def html_page(report: CardReport) -> str:
    """Return the same as HTML, with a bar for each phase and cause."""
    device = device_of(report)
    rank, phase = report.fullest, report.fullest.phases[report.limiting_phase]
    phases = [(name, peak.allocated_bytes) for name, peak in rank.phases.items()]
    parts = [
        f"<p><b>{html.escape(verdict(report, device=device))}</b></p>",
        _bars(f"Peak by phase on rank {rank.rank}", phases),
        _bars(f"Causes of the peak, in {report.limiting_phase}", causes(phase)),
        *(_table(title, fields) for title, fields in _requirements(report)),
        "".join(f"<p><small>{html.escape(line)}</small></p>" for line in report.assumptions),
    ]
    return f"<div>{''.join(parts)}</div>"


def _lines(report: CardReport) -> Iterator[str]:
    device = device_of(report)
    yield verdict(report, device=device)
    where = f"the fullest rank, {report.fullest.rank}" if len(report.ranks) > 1 else f"the {device}"
    yield from ("", f"Peak by phase on {where}", *_columns(phase_fields(report)))
    yield from ("", f"Causes of the peak, in {report.limiting_phase}", *_columns(cause_fields(report)))
    for title, fields in _requirements(report):
        yield from ("", title, *_columns(fields))
    if report.assumptions:
        yield from ("", "Assumed", *(f"  {line}" for line in report.assumptions))


def _requirements(report: CardReport) -> Iterator[tuple[str, Fields]]:
    on_cpu = device_of(report) == "process"
    yield "Tensors of a process" if on_cpu else "A card must have", card_fields(report, on_cpu=on_cpu)
    if _is_of_job(report):
        yield f"Host memory of a node, ranks: {report.host.ranks_per_node}", host_fields(report)
        disk = report.disk
        yield "Disk", [("checkpoint", format_bytes(disk.checkpoint_bytes)), ("export", format_bytes(disk.export_bytes))]


def _is_of_job(report: CardReport) -> TypeGuard[MemoryReport]:
    """Return whether it has host and disk; by attribute, since the module of the reports imports this one."""
    return hasattr(report, "host")


def device_of(report: CardReport) -> str:
    """Return what holds a rank: `card`, or `process` on CPU, which has no memory of its own."""
    return "process" if report.gpu_capacity_bytes is None else "card"


def verdict(report: CardReport, *, device: str) -> str:
    """Return one line: whether card and host hold the job, and what is left or lacking."""
    host = report.host if _is_of_job(report) else None
    if report.gpu_capacity_bytes is None and (host is None or host.capacity_bytes is None):
        required = format_bytes(report.required_bytes)
        if host is None:
            return f"It takes {required} a {device}, whose capacity is not known"
        taken = f"It takes {required} a {device} and {format_bytes(host.bytes_per_node)} a host"
        if device == "process":
            taken = (
                f"The tensors of a process take {required}; with its libraries, "
                f"{'it takes' if host.ranks_per_node == 1 else f'{host.ranks_per_node} of them take'} "
                f"{format_bytes(host.bytes_per_node)} of a host"
            )
        return f"{taken}, whose capacity is not known"
    parts = [_compare(device, report.required_bytes, report.gpu_capacity_bytes)]
    if device == "process":
        parts = [f"tensors of a process {format_bytes(report.required_bytes)}"]
    if host is not None:
        parts.append(_compare("host", host.bytes_per_node, host.capacity_bytes))
    said = "It does not fit" if not report.fits else "It fits tightly" if report.tight else "It fits"
    if _is_of_job(report):
        if report.guess and report.fits_gpu and report.host.fits:
            said = "It is not known whether it fits"
        parts += [why for why in (report.guess, report.condition) if why]
    return f"{said}: {'; '.join(parts)}"


def _compare(name: str, needed: int, capacity: int | None) -> str:
    if capacity is None:
        return f"{name} {format_bytes(needed)}, capacity unknown"
    room = capacity - needed
    rest = f"{format_bytes(room)} left" if room >= 0 else f"{format_bytes(-room)} too much"
    return f"{name} {format_bytes(needed)} of {format_bytes(capacity)}, {rest}"


def phase_fields(report: CardReport) -> Fields:
    """Return the peak of each phase of the fullest rank."""
    peaks = report.fullest.phases.items()
    mark = {report.limiting_phase: "  ◄ the peak"}
    return [(name, f"{format_bytes(phase.allocated_bytes):>10}{mark.get(name, '')}") for name, phase in peaks]


def causes(phase: PhaseReport) -> list[tuple[str, int]]:
    """Return the causes of a peak with their bytes, largest first, small ones summed up as `all else`."""
    ordered = sorted(phase.causes.items(), key=lambda item: -item[1])
    shown = [(cause, size) for cause, size in ordered if size >= LEAST_SHARE * (phase.allocated_bytes or 1)]
    rest = sum(size for _, size in ordered) - sum(size for _, size in shown)
    return [*shown, ("all else", rest)] if rest else shown


def cause_fields(report: CardReport) -> Fields:
    """Return the causes of the peak of the fullest rank, each with its share."""
    phase = report.fullest.phases[report.limiting_phase]
    whole = phase.allocated_bytes or 1
    return [(cause, f"{format_bytes(size):>10}  {size / whole:4.0%}") for cause, size in causes(phase)]


def card_fields(report: CardReport, *, on_cpu: bool) -> Fields:
    """Return what a card must have, part by part."""
    allocator = "expandable segments" if report.allocator == "expandable" else "torch's default"
    if on_cpu:
        allocator = "assumed"
    lines = [
        ("peak allocated", format_bytes(report.peak_allocated_bytes)),
        (f"allocator slack, {allocator}", format_bytes(report.allocator_slack_bytes)),
        *([] if on_cpu else [("CUDA context and NCCL", format_bytes(report.context_and_nccl_bytes))]),
        ("required", format_bytes(report.required_bytes)),
    ]
    if report.gpu_capacity_bytes is not None:
        room = report.gpu_capacity_bytes - report.required_bytes
        lines.append(("capacity", format_bytes(report.gpu_capacity_bytes)))
        lines.append(("room left" if room >= 0 else "too much", format_bytes(abs(room))))
    return [(name, f"{value:>10}") for name, value in lines]


def host_fields(report: MemoryReport) -> Fields:
    """Return what a node's host memory holds, largest first."""
    host = report.host
    ordered = sorted(host.bytes_on_node.items(), key=lambda item: -item[1])
    lines = [(cause, format_bytes(size)) for cause, size in ordered]
    lines.append(("required", format_bytes(host.bytes_per_node)))
    if host.capacity_bytes is not None:
        lines.append(("capacity", format_bytes(host.capacity_bytes)))
    return [(name, f"{value:>10}") for name, value in lines]


def _columns(fields: Fields) -> Iterator[str]:
    width = max(len(name) for name, _ in fields)
    for name, value in fields:
        yield f"  {name:<{width}}  {value}"


def _bars(title: str, sizes: list[tuple[str, int]]) -> str:
    largest = max((size for _, size in sizes), default=0) or 1
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td style='text-align:right'>{format_bytes(size)}</td><td style='width:20em'>"
        f"<div style='background:#0072B2;height:0.8em;width:{100 * size / largest:.1f}%'></div></td></tr>"
        for name, size in sizes
    )
    return f"<table><caption>{html.escape(title)}</caption>{rows}</table>"


def _table(title: str, fields: Fields) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td style='text-align:right'>{html.escape(value.strip())}</td></tr>"
        for name, value in fields
    )
    return f"<table><caption>{html.escape(title)}</caption>{rows}</table>"
