"""The tables of `toolkit estimate` with --sweep, --compare and --gpus: many estimates, one row each."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from toolkit.cli.estimate_session import EstimateSession
from toolkit.cli.output import new_table, print_json, print_table
from toolkit.units import GIB

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from toolkit.catalog.gpus import Gpu
    from toolkit.memory.scenario import Outcome, Scenario
    from toolkit.memory.search.choose_gpu import Choice
    from toolkit.memory.search.compare import Strategy
    from toolkit.memory.search.sweep import Axis, SweepRow

_NUMBERS = ("required GiB", "room GiB", "host GiB a node")


def answer_sweep(case: Scenario, axes: Sequence[Axis], *, plot: Path | None, session: EstimateSession) -> bool:
    """Estimate every combination and print a table; return whether any fits."""
    from toolkit.memory.scenario import value_text
    from toolkit.memory.search.sweep import sweep

    with session.estimating() as estimator:
        rows = list(sweep(estimator, case, axes))
        if plot is not None:
            _draw(case, axes, rows, plot)
    fits = any(row.outcome.fits for row in rows)
    if session.as_json:
        found = [{"values": row.values, **row.outcome.to_dict()} for row in rows]
        print_json({"fits": fits, "keys": [axis.key for axis in axes], "rows": found})
        return fits
    names = [axis.name for axis in axes]
    table = new_table((*names, *_NUMBERS, ""), right=(*names, *_NUMBERS))
    for row in rows:
        table.add_row(*(value_text(value) for value in row.values.values()), *_cells(row.outcome))
    print_table(table)
    _print_problems(row.outcome for row in rows)
    if plot is not None:
        print(f"drawn to {plot}")
    return fits


def answer_compare(case: Scenario, strategies: Sequence[Strategy], *, session: EstimateSession) -> bool:
    """Estimate the job under each strategy and print a table; return whether any fits."""
    from toolkit.memory.search.compare import compare

    with session.estimating() as estimator:
        found = list(compare(estimator, case, strategies))
    fits = any(row.outcome.fits for row in found)
    if session.as_json:
        print_json(
            {
                "fits": fits,
                "strategies": [
                    {"name": row.strategy.name, "full_name": row.full_name, **row.outcome.to_dict()} for row in found
                ],
            }
        )
        return fits
    table = new_table(("strategy", *_NUMBERS, ""), right=_NUMBERS)
    for row in found:
        table.add_row(row.full_name, *_cells(row.outcome))
    print_table(table)
    _print_problems(row.outcome for row in found)
    return fits


def answer_gpus(case: Scenario, gpus: Sequence[Gpu], *, session: EstimateSession) -> bool:
    """Print the smallest number of each card that holds the job; return whether any does."""
    from toolkit.memory.search.choose_gpu import choose_gpus

    with session.estimating() as estimator:
        found = sorted(choose_gpus(estimator, case, plan=case.plan(), gpus=gpus), key=_rank)
    fits = any(choice.outcome.fits for choice in found)
    if session.as_json:
        print_json({"fits": fits, "gpus": [choice.to_dict() for choice in found]})
        return fits
    heads = ("card", "count", "as", "all together GiB", "ZeRO", *_NUMBERS, "batch")
    table = new_table(heads, right=("count", "all together GiB", "ZeRO", *_NUMBERS))
    for choice in found:
        table.add_row(*_choice_cells(choice))
    print_table(table)
    _print_problems(choice.outcome for choice in found)
    return fits


def _rank(choice: Choice) -> tuple[bool, int, str]:
    return (not choice.outcome.fits, choice.total_memory_bytes, choice.gpu.name)


def _choice_cells(choice: Choice) -> list[str | Text]:
    count, plan = choice.count, choice.outcome.plan
    stage = "" if plan is None else str(plan.settings.zero_stage)
    *numbers, said = _cells(choice.outcome)
    if not choice.outcome.fits:
        why = said if choice.outcome.report is None else Text(f"none up to {count.total} holds it", style="red")
        return [choice.gpu.name, "–", "", "", stage, *numbers, why]
    machines = "1 machine" if count.nodes == 1 else f"{count.nodes} machines of {count.gpus_per_node}"
    total = f"{choice.total_memory_bytes / GIB:.0f}"
    kept = choice.kept + ("; tight" if choice.outcome.is_tight else "")
    return [choice.gpu.name, str(count.total), machines, total, stage, *numbers, kept]


def _cells(outcome: Outcome) -> list[str | Text]:
    """Return required memory, room, host memory and the verdict, coloured by whether it fits; error codes without an estimate."""
    report = outcome.report
    if report is None:
        return ["–", "", "", Text(", ".join(dict.fromkeys(p.code for p in outcome.problems)), style="magenta")]
    style = "red" if not report.fits else "yellow" if report.tight else "green"
    capacity = report.gpu_capacity_bytes
    room = "" if capacity is None else f"{(capacity - report.required_bytes) / GIB:.2f}"
    said = "fits, tight" if report.tight else "fits"
    if not report.fits:
        said = "card too small" if not report.fits_gpu else "host too small" if not report.host.fits else "not known"
    return [
        Text(f"{report.required_bytes / GIB:.2f}", style=style),
        Text(room, style=style),
        f"{report.host.bytes_per_node / GIB:.1f}",
        Text(said, style=style),
    ]


def _print_problems(outcomes: Iterable[Outcome]) -> None:
    """Print below a table why rows have no estimate, each reason once, as it is too long for a cell."""
    for problem in dict.fromkeys(problem for outcome in outcomes for problem in outcome.problems):
        print(problem)


def _draw(case: Scenario, axes: Sequence[Axis], rows: Sequence[SweepRow], path: Path) -> None:
    from toolkit.memory.report.figures import plot_heat_map

    cells: dict[tuple[Any, ...], Any] = {}
    for row in rows:
        report = row.outcome.report
        required = None if report is None else report.required_bytes / GIB
        cells[tuple(row.values.values())] = (required, row.outcome.fits, row.outcome.is_tight)
    plot_heat_map(
        path,
        names=[axis.name for axis in axes],
        values=[axis.values for axis in axes],
        cells=cells,
        title=f"{case.model.name} on {case.job.cluster.num_ranks} × {case.gpu.name}",
    )
