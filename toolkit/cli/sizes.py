"""Sizes of a grid on the command line, and the placement of ranks that they or a job ask for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.cli.options import read_job
from toolkit.errors import PlanError

if TYPE_CHECKING:
    from toolkit.config.job import Job
    from toolkit.topology.placement import Placement

# Ranks of the largest published runs (arXiv 2407.21783, section 3.3); as a table, they take half a minute.
_MOST_RANKS = 16_384

PipelineOption = Annotated[int | None, typer.Option("--pp", min=1, help="Pipeline stages.", show_default="1")]
DataOption = Annotated[
    int | None, typer.Option("--dp", min=1, help="Data-parallel replicas.", show_default="what is left")
]
TensorOption = Annotated[int | None, typer.Option("--tp", min=1, help="Tensor-parallel ranks.", show_default="1")]
NodesOption = Annotated[int | None, typer.Option("--nodes", min=1, help="Machines.", show_default="1")]
DevicesOption = Annotated[
    int | None,
    typer.Option("--gpus-per-node", min=1, help="Devices of each.", show_default="as many as the sizes need"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes given on the command line; None where one is left out."""

    pp: int | None = None
    dp: int | None = None
    tp: int | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None

    def options(self) -> list[str]:
        """Return the options that were given."""
        return [f"--{name.replace('_', '-')}" for name, size in asdict(self).items() if size is not None]


def check_arguments(job: Path | None, overrides: Sequence[str] | None, sizes: Sizes) -> None:
    """Reject sizes next to a job, and changes of a job without one.

    Raises:
        typer.BadParameter: One of them would be ignored.
    """
    given = sizes.options()
    if job is not None and given:
        raise typer.BadParameter(f"{', '.join(given)} would be ignored next to JOB: use --set", param_hint="JOB")
    if job is None and overrides:
        raise typer.BadParameter("it needs a JOB", param_hint="--set")


def with_launched_sizes(sizes: Sizes) -> Sizes:
    """Fill in nodes and devices of a launcher's environment if neither is given."""
    from toolkit.launch.identity import rank_from_environment

    identity = rank_from_environment(os.environ)
    given = sizes.nodes is not None or sizes.gpus_per_node is not None
    if identity is None or given or identity.local_world_size is None:
        return sizes
    num_nodes, left_over = divmod(identity.world_size, identity.local_world_size)
    return sizes if left_over else replace(sizes, nodes=num_nodes, gpus_per_node=identity.local_world_size)


def read_placement(job: Path | None, overrides: Sequence[str] | None, sizes: Sizes) -> tuple[Job | None, Placement]:
    """Place the ranks of a job, or of sizes; the job is None if there are only sizes.

    Raises:
        typer.BadParameter: Neither is given, or the sizes do not divide.
        SpecError: The job cannot be read.
        PlanError: GRID_SIZE, GRID_WORLD, WORLD_SIZE.
    """
    if job is not None:
        from toolkit.topology.placement import place_job

        read = read_job(job, overrides)
        placement = place_job(read)
    else:
        if not sizes.options():
            raise typer.BadParameter("give a job, or sizes such as --tp 2 --gpus-per-node 8", param_hint="JOB")
        read = None
        _check_size(
            max((sizes.pp or 1) * (sizes.dp or 1) * (sizes.tp or 1), (sizes.nodes or 1) * (sizes.gpus_per_node or 1))
        )
        placement = _place(sizes)
    _check_size(placement.grid.world_size)
    return read, placement


def _check_size(num_ranks: int) -> None:
    if num_ranks > _MOST_RANKS:
        raise PlanError.of(
            code="GRID_SIZE",
            key="topology",
            message=f"{num_ranks} ranks exceed the {_MOST_RANKS} that this command can list",
            fix=f"Give sizes whose product is at most {_MOST_RANKS}; larger grids repeat the pattern of smaller ones",
        )


def _place(sizes: Sizes) -> Placement:
    from toolkit.topology import Grid, place

    pp, tp, nodes, gpus_per_node = sizes.pp or 1, sizes.tp or 1, sizes.nodes or 1, sizes.gpus_per_node
    if gpus_per_node is None:
        needed = pp * (sizes.dp or 1) * tp
        if needed % nodes:
            raise typer.BadParameter(
                f"{nodes} nodes do not divide pp × dp × tp = {needed} ranks evenly", param_hint="--nodes"
            )
        gpus_per_node = needed // nodes
    if sizes.dp is None:
        grid = Grid.from_world(world_size=nodes * gpus_per_node, pp=pp, tp=tp)
    else:
        grid = Grid(pp=pp, dp=sizes.dp, tp=tp)
    return place(grid, num_nodes=nodes, gpus_per_node=gpus_per_node)
