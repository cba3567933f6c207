"""`toolkit topology`: the place of each rank, and its groups."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.cli.options import JsonOption, OptionalJobArgument, SetOption, read_plan
from toolkit.cli.output import new_table, print_json, print_table
from toolkit.cli.sizes import (
    DataOption,
    DevicesOption,
    NodesOption,
    PipelineOption,
    Sizes,
    TensorOption,
    check_arguments,
    read_placement,
    with_launched_sizes,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from toolkit.pipeline_schedule import StageSpec
    from toolkit.planning.plan import Plan
    from toolkit.topology.links import Boundary
    from toolkit.topology.placement import Placement


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(topology)


def topology(
    job: OptionalJobArgument = None,
    pp: PipelineOption = None,
    dp: DataOption = None,
    tp: TensorOption = None,
    nodes: NodesOption = None,
    gpus_per_node: DevicesOption = None,
    check: Annotated[bool, typer.Option("--check", hidden=True, help="The same as `toolkit diagnose`.")] = False,
    timeout: Annotated[float | None, typer.Option("--timeout", min=1.0, hidden=True, help="Of --check.")] = None,
    schedule: Annotated[bool, typer.Option("--schedule", hidden=True, help="The same as `toolkit schedule`.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            metavar="FILE",
            help="Draw ranks, nodes, layers and links as .svg, .png or .html.",
            show_default=False,
        ),
    ] = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show each rank's node, coordinate, layers and groups, of a job or of sizes.

    `toolkit diagnose` tests the groups, `toolkit schedule` shows a step of the pipeline.

    Example: `toolkit topology job.yaml --plot ranks.svg`, `toolkit topology --pp 2 --tp 2 --nodes 2 --gpus-per-node 4`

    JSON keys: grid (pp, dp, tp), world_size, num_nodes, gpus_per_node, ranks (rank, node, local_rank, coordinate; of a
    job's pipeline also layers: first and one past the last of each chunk, and parts: embedding, norm, head),
    groups (by kind: size, num_groups, inside_node, max_nodes, ranks), links (start and stop of each boundary of the
    pipeline, num_links, over_network).
    """
    sizes = Sizes(pp=pp, dp=dp, tp=tp, nodes=nodes, gpus_per_node=gpus_per_node)
    check_arguments(job, overrides, sizes)
    if timeout is not None and not check:
        raise typer.BadParameter("it requires --check", param_hint="--timeout")
    if plot is not None and check:
        raise typer.BadParameter("--plot and --check are mutually exclusive", param_hint="--plot")
    if schedule:
        _show_schedule(job, overrides, check=check, plot=plot, as_json=as_json)
        return
    read, placement = read_placement(job, overrides, with_launched_sizes(sizes) if check and job is None else sizes)
    if check:
        from toolkit.cli.diagnose import DEFAULT_TIMEOUT, check_placement

        gpu = None if read is None else read.cluster.gpu
        timeout_seconds = timeout or DEFAULT_TIMEOUT
        raise typer.Exit(check_placement(placement, gpu=gpu, timeout_seconds=timeout_seconds, as_json=as_json))
    plan = read_plan(job, overrides) if job is not None and read is not None and read.parallel.pipeline > 1 else None
    _show(placement, plan, plot=plot, as_json=as_json)


def _show(placement: Placement, plan: Plan | None, *, plot: Path | None, as_json: bool) -> None:
    from toolkit.topology.links import boundaries

    held = () if plan is None else tuple(map(plan.stage, range(plan.grid.pp)))
    links = boundaries(placement, goes_round=plan is not None and plan.settings.virtual_stages > 1)
    if plot is not None:
        from toolkit.cli.topology_picture import draw

        draw(placement, held, links, plot)
    if as_json:
        print_json(_as_dict(placement, held, links))
        return
    _print(placement, held, links)
    if plot is not None:
        print(f"drawn: {plot}")


def _as_dict(placement: Placement, held: Sequence[StageSpec], links: Sequence[Boundary]) -> dict[str, Any]:
    from dataclasses import asdict

    from toolkit.topology.table import to_dict

    result = to_dict(placement)
    for rank in result["ranks"] if held else ():
        part = held[rank["coordinate"]["pp"]]
        rank |= {"layers": [[run.start, run.stop] for run in part.chunks], "parts": list(part.ends)}
    return result | {"links": [asdict(link) for link in links]}


def _show_schedule(
    job: Path | None, overrides: list[str] | None, *, check: bool, plot: Path | None, as_json: bool
) -> None:
    from toolkit.cli import schedule_chart

    if job is None:
        raise typer.BadParameter("--schedule needs a JOB", param_hint="JOB")
    if check:
        raise typer.BadParameter("--check and --schedule are mutually exclusive", param_hint="--check")
    schedule_chart.show(read_plan(job, overrides), plot=plot, as_json=as_json)


def _print(placement: Placement, held: Sequence[StageSpec], links: Sequence[Boundary]) -> None:
    from toolkit.topology.links import describe_boundaries
    from toolkit.topology.table import HEADER, rows

    table = new_table((*HEADER, "holds") if held else HEADER, right=HEADER)
    previous = 0
    for row in rows(placement):
        if row.node != previous:
            table.add_section()
            previous = row.node
        table.add_row(*row.cells(), *([str(held[row.coordinate.pp])] if held else []))
    print_table(table)
    for line in (*placement.describe(), *describe_boundaries(links)):
        print(line)
