"""`toolkit topology`: the place of each rank, and its groups."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.cli.options import JsonOption, OptionalJobArgument, SetOption, read_job, read_plan
from toolkit.cli.output import new_table, print_json, print_table
from toolkit.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from toolkit.pipeline_schedule import StageSpec
    from toolkit.planning.plan import Plan
    from toolkit.topology.links import Boundary
    from toolkit.topology.placement import Placement


# Ranks of the largest published runs (arXiv 2407.21783, section 3.3); as a table, they take half a minute.
_MOST_RANKS = 16_384


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(topology)


def topology(
    job: OptionalJobArgument = None,
    pp: Annotated[int | None, typer.Option(min=1, help="Pipeline stages.", show_default="1")] = None,
    dp: Annotated[int | None, typer.Option(min=1, help="Data-parallel replicas.", show_default="what is left")] = None,
    tp: Annotated[int | None, typer.Option(min=1, help="Tensor-parallel ranks.", show_default="1")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Machines.", show_default="1")] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(min=1, help="Devices of each.", show_default="as many as the sizes need")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Prove every group by real collectives; on CPU where cards are too few.")
    ] = False,
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            metavar="SECONDS",
            min=1.0,
            help="With --check: when no rank moves for so long, say who waits for whom, and end.",
            show_default="60",
        ),
    ] = None,
    schedule: Annotated[
        bool, typer.Option("--schedule", help="Show a step of the job's pipeline: which pipeline rank does what, when.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            metavar="FILE",
            help="Draw ranks, nodes, layers and links, or with --schedule the step, as .svg, .png or .html.",
            show_default=False,
        ),
    ] = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show each rank's node, coordinate, layers and groups, of a job or of sizes; prove them by --check; a step by --schedule.

    A check starts the ranks of this machine. Under torchrun, `deepspeed` or `accelerate launch` it is one of their ranks,
    on any number of machines, and sizes that are left out are theirs.

    Example: `toolkit topology job.yaml --plot ranks.svg`, `toolkit topology --pp 2 --tp 2 --nodes 2 --gpus-per-node 4`,
    `torchrun --nproc-per-node 8 -m toolkit topology --tp 4 --check`, `toolkit topology job.yaml --schedule --plot step.svg`.

    JSON keys: grid (pp, dp, tp), world_size, num_nodes, gpus_per_node, ranks (rank, node, local_rank, coordinate; of a
    job's pipeline also layers: first and one past the last of each chunk, and parts: embedding, norm, head),
    groups (by kind: size, num_groups, inside_node, max_nodes, ranks), links (start and stop of each boundary of the
    pipeline, num_links, over_network). With --check also check: passed, backend, operations,
    kinds (by kind: passed, seconds, bus_gb_per_second, which is null on CPU), waiting (of ranks that hang: kind, operation,
    group, waiting, missing), problems. With --schedule instead: schedule, pp, micro_batches, virtual_stages,
    bubble_fraction, makespan (in forward passes), stages (stage, pipeline_rank, chunk, layers: first and one past the last,
    in_flight), ranks (pipeline_rank, in_flight, bubble_fraction, passes: kind, chunk, micro_batch, start, end).
    """
    sizes = {"--pp": pp, "--dp": dp, "--tp": tp, "--nodes": nodes, "--gpus-per-node": gpus_per_node}
    given = [option for option, size in sizes.items() if size is not None]
    if job is not None and given:
        raise typer.BadParameter(f"{', '.join(given)} would be ignored beside JOB: use --set", param_hint="JOB")
    if job is None and overrides:
        raise typer.BadParameter("it needs a JOB", param_hint="--set")
    if timeout is not None and not check:
        raise typer.BadParameter("it requires --check", param_hint="--timeout")
    if plot is not None and check:
        raise typer.BadParameter("--plot and --check are mutually exclusive", param_hint="--plot")
    if schedule:
        _show_schedule(job, overrides, check=check, plot=plot, as_json=as_json)
        return
    if check and job is None:
        nodes, gpus_per_node = _launched_sizes(nodes, gpus_per_node)
        given += ["--gpus-per-node"] if gpus_per_node is not None else []
    if job is None and not given:
        raise typer.BadParameter("give a job, or sizes such as --tp 2 --gpus-per-node 8", param_hint="JOB")
    if job is None:
        _check_size(max((pp or 1) * (dp or 1) * (tp or 1), (nodes or 1) * (gpus_per_node or 1)))
    read = None if job is None else read_job(job, overrides)
    if read is not None:
        from toolkit.topology.placement import place_job

        placement = place_job(read)
    else:
        placement = _place_sizes(pp=pp or 1, dp=dp, tp=tp or 1, nodes=nodes or 1, gpus_per_node=gpus_per_node)
    _check_size(placement.grid.world_size)
    if check:
        from toolkit.cli import topology_check

        gpu = None if read is None else read.cluster.gpu
        raise typer.Exit(topology_check.check(placement, gpu=gpu, timeout_seconds=timeout or 60.0, as_json=as_json))
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
        raise typer.BadParameter("micro-batches and layers are a job's: name one", param_hint="JOB")
    if check:
        raise typer.BadParameter(
            "it proves groups, and --schedule shows a step: give one of them", param_hint="--check"
        )
    schedule_chart.show(read_plan(job, overrides), plot=plot, as_json=as_json)


def _launched_sizes(nodes: int | None, gpus_per_node: int | None) -> tuple[int | None, int | None]:
    """Fill in the launcher's sizes if neither is given."""
    from toolkit.launch.environment import rank_from_environment

    identity = rank_from_environment(os.environ)
    local_size = os.environ.get("LOCAL_WORLD_SIZE", "")
    if identity is None or nodes is not None or gpus_per_node is not None or not local_size.isdecimal():
        return nodes, gpus_per_node
    num_nodes, left_over = divmod(identity.world_size, int(local_size))
    return (nodes, gpus_per_node) if left_over else (num_nodes, int(local_size))


def _check_size(num_ranks: int) -> None:
    if num_ranks > _MOST_RANKS:
        raise PlanError.of(
            code="GRID_SIZE",
            key="topology",
            message=f"{num_ranks} ranks exceed the {_MOST_RANKS} that this command can list",
            fix=f"Give sizes whose product is at most {_MOST_RANKS}; larger grids repeat the pattern of smaller ones",
        )


def _place_sizes(*, pp: int, dp: int | None, tp: int, nodes: int, gpus_per_node: int | None) -> Placement:
    from toolkit.topology import Grid, place

    if gpus_per_node is None:
        needed = pp * (dp or 1) * tp
        if needed % nodes:
            raise typer.BadParameter(
                f"{nodes} nodes do not divide pp × dp × tp = {needed} ranks evenly", param_hint="--nodes"
            )
        gpus_per_node = needed // nodes
    world_size = nodes * gpus_per_node
    grid = Grid.from_world(world_size=world_size, pp=pp, tp=tp) if dp is None else Grid(pp=pp, dp=dp, tp=tp)
    return place(grid, num_nodes=nodes, gpus_per_node=gpus_per_node)


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
