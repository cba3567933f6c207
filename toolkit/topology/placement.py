"""Placement of the ranks of a grid on nodes, and which groups communicate over the network."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING

from toolkit.errors import PlanError, Problem, raise_all
from toolkit.topology.grid import Grid, divisors, one_of

if TYPE_CHECKING:
    from toolkit.config.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupKind:
    """The placement of the groups of one kind on nodes.

    Args:
        kind: Name of the kind, as in `KINDS`.
        size: Number of ranks in a group.
        num_groups: Number of groups of this kind.
        max_nodes: Largest number of nodes that one of them spans.
    """

    kind: str
    size: int
    num_groups: int
    max_nodes: int

    @property
    def inside_node(self) -> bool:
        """True if every group of this kind stays on one node."""
        return self.max_nodes == 1

    def __str__(self) -> str:
        count = f"{self.num_groups} {'group' if self.num_groups == 1 else 'groups'} of {self.size}"
        return f"{self.kind}: {count}, {'inside a node' if self.inside_node else f'over up to {self.max_nodes} nodes'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A grid on machines: node n holds ranks n × gpus_per_node onwards, as torchrun and DeepSpeed number them.

    >>> placement = place(Grid(pp=2, dp=2, tp=2), num_nodes=2, gpus_per_node=4)
    >>> placement.node(5), placement.local_rank(5)
    (1, 1)
    >>> for kind in placement.describe():
    ...     print(kind)
    tp: 4 groups of 2, inside a node
    dp: 4 groups of 2, inside a node
    pp: 4 groups of 2, over up to 2 nodes
    model: 2 groups of 4, over up to 2 nodes
    stage: 2 groups of 4, inside a node
    dp-pp: 2 groups of 4, over up to 2 nodes
    world: 1 group of 8, over up to 2 nodes
    """

    grid: Grid
    num_nodes: int
    gpus_per_node: int

    def node(self, rank: int) -> int:
        """Return the node of a rank, from 0."""
        return rank // self.gpus_per_node

    def local_rank(self, rank: int) -> int:
        """Return the index of a rank on its node, from 0: `LOCAL_RANK`."""
        return rank % self.gpus_per_node

    def nodes(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return the nodes of some ranks, ascending."""
        return tuple(sorted({rank // self.gpus_per_node for rank in ranks}))

    def kind(self, *kinds: str) -> GroupKind:
        """Return the placement of one kind of group, named as in `Grid.groups`."""
        groups = self.grid.groups(*kinds)
        widest = max(len({rank // self.gpus_per_node for rank in group}) for group in groups)
        return GroupKind(kind="-".join(kinds), size=len(groups[0]), num_groups=len(groups), max_nodes=widest)

    def describe(self) -> tuple[GroupKind, ...]:
        """Return the placement of every kind of the grid."""
        return tuple(self.kind(kind) for kind in self.grid.kinds)


def place_job(job: Job) -> Placement:
    """Place a job's grid on its nodes.

    Raises:
        PlanError: GRID_WORLD, TP_SPANS_NODES.
    """
    return place(Grid.of(job), num_nodes=job.cluster.nodes, gpus_per_node=job.cluster.gpus_per_node)


def place(grid: Grid, num_nodes: int, gpus_per_node: int) -> Placement:
    """Place the ranks of a grid on nodes.

    Args:
        grid: Grid of ranks.
        num_nodes: Number of machines, at least 1.
        gpus_per_node: Number of devices of each, at least 1; each runs one rank.

    Raises:
        PlanError: GRID_WORLD, if there are more or fewer ranks than devices; TP_SPANS_NODES, if a tensor group
            spans two nodes.
    """
    if num_nodes < 1 or gpus_per_node < 1:
        raise ValueError(f"num_nodes={num_nodes} and gpus_per_node={gpus_per_node} must be 1 or more")
    raise_all(PlanError, _problems(grid, num_nodes, gpus_per_node))
    return Placement(grid=grid, num_nodes=num_nodes, gpus_per_node=gpus_per_node)


def _problems(grid: Grid, num_nodes: int, gpus_per_node: int) -> Iterable[Problem]:
    num_devices = num_nodes * gpus_per_node
    if grid.world_size != num_devices:
        model_size = grid.size("model")
        fits = num_devices % model_size == 0
        yield Problem(
            code="GRID_WORLD",
            key="parallel",
            message=f"pipeline={grid.pp} × data={grid.dp} × tensor={grid.tp} = {grid.world_size} ranks differs from "
            f"nodes={num_nodes} × gpus_per_node={gpus_per_node} = {num_devices} devices: each device runs one rank",
            fix=f"Set data to {num_devices // model_size}"
            if fits
            else f"Set pipeline × tensor to {one_of(divisors(num_devices))}",
        )
    # Tensor groups are aligned runs of tp ranks: the first that spans nodes is the one at the end of the first node.
    if num_nodes > 1 and gpus_per_node % grid.tp:
        first = gpus_per_node // grid.tp * grid.tp
        group = range(first, first + grid.tp)
        last_node = min(group[-1] // gpus_per_node, num_nodes - 1)
        stage_size, left_over = divmod(num_devices, grid.pp)
        valid = divisors(gpus_per_node if left_over else gcd(gpus_per_node, stage_size))
        yield Problem(
            code="TP_SPANS_NODES",
            key="parallel.tensor",
            message=f"tensor={grid.tp} does not divide gpus_per_node={gpus_per_node}: the tensor group of ranks "
            f"{group[0]} to {group[-1]} spans nodes 0 to {last_node}, so its layers would all-reduce over the network",
            fix=f"Set tensor to {one_of(valid)}",
        )
