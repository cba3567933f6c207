"""Process groups from sizes, for scripts of the user's own: `tk.groups`.

Ranks form a grid of pipeline × data × tensor, numbered so that tensor ranks are neighbours. `init` joins the launcher's
processes to it and returns a `World`, whose `group("dp")`, `group("tp")`, `group("pp")` are the groups of this rank; a
torch `DeviceMesh` goes in (`from_device_mesh`) and out (`to_device_mesh`), and `fake` makes a world of one real process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from toolkit.arguments import checks_arguments
from toolkit.distributed.fake import fake_world
from toolkit.distributed.process_groups import join_group
from toolkit.distributed.world import World, destroy_world, init_world
from toolkit.errors import PlanError, RunError
from toolkit.launch.identity import rank_from_environment
from toolkit.topology.grid import AXES, Axis, Grid

__all__ = ["Grid", "World", "destroy", "fake", "from_device_mesh", "init", "to_device_mesh"]


@checks_arguments
def init(*, pp: int = 1, tp: int = 1, backend: Literal["nccl", "gloo"] | None = None) -> World:
    """Join the processes that a launcher has started to a grid; what pp × tp leaves is data-parallel.

    Args:
        pp: Pipeline ranks.
        tp: Tensor ranks.
        backend: `nccl` or `gloo`; by default `nccl` where torch sees a GPU.

    Raises:
        PlanError: GRID_WORLD if pp × tp does not divide the number of processes; WORLD_SIZE if the script has joined groups
            that the launcher's variables do not describe; GRID_SIZE; WORLD_NO_GPU.
    """
    identity = rank_from_environment(os.environ)
    rank, size = (0, 1) if identity is None else (identity.rank, identity.world_size)
    if dist.is_initialized() and (dist.get_rank(), dist.get_world_size()) != (rank, size):
        raise PlanError.of(
            code="WORLD_SIZE",
            key="init",
            message=f"this process has joined torch's groups as rank {dist.get_rank()} of {dist.get_world_size()}, but the "
            f"launcher's variables make it rank {rank} of {size}",
            fix="Start it with torchrun, or pass a mesh of torch's to from_device_mesh, which takes the ranks from torch",
        )
    if pp > 0 and tp > 0 and size % (pp * tp):
        raise PlanError.of(
            code="GRID_WORLD",
            key="init",
            message=f"pp={pp} × tp={tp} = {pp * tp} ranks do not divide the number of processes, {size}",
            fix=f"Start a multiple of {pp * tp} processes, such as torchrun --nproc-per-node {pp * tp}, or change pp and tp",
        )
    grid = Grid.from_world(world_size=size, pp=pp, tp=tp)
    return init_world(grid, backend=backend or ("nccl" if torch.cuda.is_available() else "gloo"))


def destroy(world: World) -> None:
    """Leave the process groups that `init` joined."""
    destroy_world(world)


@checks_arguments
def to_device_mesh(world: World) -> DeviceMesh:
    """Return the grid as a torch mesh with the dimensions `pp`, `dp` and `tp`, over the groups that the world has.

    Collectives:
        All ranks create the groups that do not exist yet.
    """
    grid = world.grid
    ranks = torch.arange(grid.world_size, dtype=torch.int).view(grid.pp, grid.dp, grid.tp)
    groups = [world.group(axis) for axis in AXES]
    return DeviceMesh.from_group(groups, world.device.type, ranks, mesh_dim_names=AXES)


@checks_arguments
def from_device_mesh(mesh: DeviceMesh) -> World:
    """Return a world over the groups of a torch mesh whose dimensions are some of `pp`, `dp` and `tp`, in this order.

    Raises:
        PlanError: MESH_LAYOUT for a mesh with other dimensions or none by name, in another order, or not over all ranks in order.

    Collectives:
        All ranks create the groups of dimensions that the mesh lacks.
    """
    names = mesh.mesh_dim_names or ()
    sizes = {name: mesh.mesh.size(index) for index, name in enumerate(names)}
    in_order = mesh.mesh.flatten().tolist() == list(range(dist.get_world_size()))
    if not in_order or len(names) != mesh.ndim or [axis for axis in AXES if axis in sizes] != list(names):
        raise PlanError.of(
            code="MESH_LAYOUT",
            key="mesh",
            message=f"a mesh with the dimensions {names or '(unnamed)'} over the ranks {mesh.mesh.flatten().tolist()} is not a grid: "
            f"its dimensions must be some of {', '.join(get_args(Axis))}, in this order, over all ranks in order",
            fix='Make it by init_device_mesh(device_type, sizes, mesh_dim_names=("pp", "dp", "tp"))',
        )
    grid, rank = Grid(**sizes), dist.get_rank()
    is_cuda = mesh.device_type == "cuda"
    return World(
        rank=rank,
        local_rank=_local_rank(rank, grid.world_size),
        device=torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device(mesh.device_type),
        grid=grid,
        coordinate=grid.coordinate(rank),
        dp_group=mesh.get_group("dp") if "dp" in sizes else join_group(grid, rank, "dp"),
        tp_group=mesh.get_group("tp") if grid.tp > 1 else None,
        owns_groups=False,
    )


def _local_rank(rank: int, size: int) -> int:
    """Return what a launcher's or scheduler's variables say of this rank; its own number if they say nothing of the groups it has joined."""
    try:
        identity = rank_from_environment(os.environ)
    except RunError:  # a script that has joined by other means may leave them incomplete
        return rank
    return (
        identity.local_rank if identity is not None and (identity.rank, identity.world_size) == (rank, size) else rank
    )


@checks_arguments
@contextmanager
def fake(*, pp: int = 1, dp: int = 1, tp: int = 1, rank: int = 0) -> Iterator[World]:
    """Make this process one rank of a world whose others do not exist: shapes are right, values are not.

    Args:
        pp: Pipeline ranks.
        dp: Data-parallel ranks.
        tp: Tensor ranks.
        rank: Rank of this process.

    Raises:
        PlanError: GRID_SIZE.
        ValueError: If the process has joined a group, or `rank` is not in the grid.
    """
    grid = Grid(pp=pp, dp=dp, tp=tp)
    with fake_world(grid, rank=rank):
        yield World(
            rank=rank,
            local_rank=rank,
            device=torch.device("cpu"),
            grid=grid,
            coordinate=grid.coordinate(rank),
            dp_group=join_group(grid, rank, "dp"),
            tp_group=join_group(grid, rank, "tp") if tp > 1 else None,
            owns_groups=False,
        )
