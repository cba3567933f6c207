"""The grid of ranks: pipeline × data × tensor, and the ranks of every group. Arithmetic only.

Data-parallel ranks hold the same parameters, or under ZeRO shards of them. With context parallelism runs of `cp` neighbours among
them read the same rows, of which each keeps a slice of the sequence; the others read different rows. All of them shard and sum as one
data-parallel group.

Ranks are numbered in row-major order over (pp, dp, tp), so the ranks of a tensor group are adjacent and lie on one node, and
pipeline stages are farthest apart: the traffic of a stage boundary is the smallest. DeepSpeed's
`PipeModelDataParallelTopology` (deepspeed/runtime/pipe/topology.py) numbers ranks in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import isqrt
from typing import TYPE_CHECKING, Literal, get_args

from toolkit.errors import PlanError, Problem, raise_all

if TYPE_CHECKING:
    from toolkit.config.job import Job

Axis = Literal["pp", "dp", "tp"]
AXES: tuple[Axis, ...] = get_args(Axis)

# The kinds of group that the toolkit uses, by name, with the axes that a group extends over.
KINDS: dict[str, tuple[Axis, ...]] = {
    "tp": ("tp",),
    "dp": ("dp",),
    "pp": ("pp",),
    "model": ("pp", "tp"),
    "stage": ("dp", "tp"),
    "dp-pp": ("pp", "dp"),
    "world": AXES,
}
# Ranks that read the same rows, each a slice of them: a part of the data axis.
CONTEXT = "cp"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Coordinate:
    """Index of a rank on each axis, from 0."""

    pp: int
    dp: int
    tp: int

    def as_dict(self) -> dict[str, int]:
        """Return `{"pp": …, "dp": …, "tp": …}`."""
        return {"pp": self.pp, "dp": self.dp, "tp": self.tp}


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Sizes of the three axes, outermost first, and how many data-parallel neighbours share a row.

    >>> grid = Grid(pp=2, dp=2, tp=2)
    >>> grid.coordinate(5)
    Coordinate(pp=1, dp=0, tp=1)
    >>> for kind in ("tp", "dp", "pp", "model", "stage"):
    ...     print(f"{kind:6}", *grid.groups(kind))
    tp     (0, 1) (2, 3) (4, 5) (6, 7)
    dp     (0, 2) (1, 3) (4, 6) (5, 7)
    pp     (0, 4) (1, 5) (2, 6) (3, 7)
    model  (0, 1, 4, 5) (2, 3, 6, 7)
    stage  (0, 1, 2, 3) (4, 5, 6, 7)
    >>> long = Grid(dp=4, cp=2)
    >>> long.groups("cp"), long.groups("dp"), long.row_groups, [long.row_group(rank) for rank in range(4)]
    (((0, 1), (2, 3)), ((0, 1, 2, 3),), 2, [0, 0, 1, 1])

    Args:
        pp: Number of pipeline ranks.
        dp: Number of data-parallel ranks, over which ZeRO shards.
        tp: Number of tensor ranks, which share each layer.
        cp: Number of neighbouring data-parallel ranks that share each row by slices of its sequence.

    Raises:
        PlanError: GRID_SIZE, if a size is below 1, or `cp` does not divide `dp`.
    """

    pp: int = 1
    dp: int = 1
    tp: int = 1
    cp: int = 1

    def __post_init__(self) -> None:
        raise_all(
            PlanError,
            (
                Problem(
                    code="GRID_SIZE",
                    key=key if key.startswith("parallel.") else "cluster.gpus_per_node",
                    message=f"{axis}={size} ({name}) is below 1: each axis of the grid has at least one rank",
                    fix=f"Set {axis} to 1 or more; in a job it is {key}",
                )
                for axis, name, key, size in (
                    ("pp", "pipeline", "parallel.pipeline", self.pp),
                    ("dp", "data-parallel", "what pipeline and tensor leave of the cluster's ranks", self.dp),
                    ("tp", "tensor", "parallel.tensor", self.tp),
                    ("cp", "context", "parallel.context", self.cp),
                )
                if size < 1
            ),
        )
        if self.dp % self.cp:
            raise PlanError.of(
                code="GRID_SIZE",
                key="parallel.context",
                message=f"cp={self.cp} does not divide dp={self.dp}: the ranks that share a row are among the data-parallel ones",
                fix=f"Set cp to {one_of(divisors(self.dp))}",
            )

    @classmethod
    def of(cls, job: Job) -> Grid:
        """Build the grid of a job; raise as `from_world` does."""
        parallel = job.parallel
        return cls.from_world(
            world_size=job.cluster.num_ranks, pp=parallel.pipeline, tp=parallel.tensor, cp=parallel.context
        )

    @classmethod
    def from_world(cls, *, world_size: int, pp: int = 1, tp: int = 1, cp: int = 1) -> Grid:
        """Build the grid that fills `world_size` ranks; the data-parallel size is world_size / (pp × tp).

        >>> Grid.from_world(world_size=16, pp=2, tp=4)
        Grid(pp=2, dp=2, tp=4, cp=1)

        Raises:
            PlanError: GRID_WORLD, if pp × tp × cp does not divide world_size; GRID_SIZE.
        """
        model = cls(pp=pp, tp=tp, dp=max(cp, 1), cp=cp)
        if cp > 1 and world_size % model.world_size:
            fitting = one_of(divisors(max(world_size // (pp * tp), 1)))
            raise PlanError.of(
                code="GRID_WORLD",
                key="parallel.context",
                message=f"context={cp} × pipeline={pp} × tensor={tp} = {model.world_size} ranks do not divide "
                f"nodes × gpus_per_node = {world_size} ranks: each row needs all of its ranks",
                fix=f"Set context to {fitting}, or gpus_per_node so that nodes × gpus_per_node is a multiple of {model.world_size}",
            )
        if world_size < 1 or world_size % model.world_size:
            raise PlanError.of(
                code="GRID_WORLD",
                key="parallel",
                message=f"pipeline={pp} × tensor={tp} = {model.world_size} ranks do not divide "
                f"nodes × gpus_per_node = {world_size} ranks: each model replica needs all of its ranks",
                fix=f"Set pipeline × tensor to {one_of(divisors(world_size))}, or gpus_per_node so that nodes × gpus_per_node "
                f"is a multiple of {model.world_size}",
            )
        return cls(pp=pp, dp=world_size // (pp * tp), tp=tp, cp=cp)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp * self.tp

    @property
    def row_groups(self) -> int:
        """Number of data-parallel groups of ranks that read different rows: dp / cp, the one of the batch equation."""
        return self.dp // self.cp

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the kinds of group that this grid has: those of `KINDS`, and `"cp"` where ranks share rows."""
        return (*KINDS, *((CONTEXT,) if self.cp > 1 else ()))

    def row_group(self, rank: int) -> int:
        """Return which of the `row_groups` a rank is in; its ranks read the same rows."""
        return self.coordinate(rank).dp // self.cp

    def context_rank(self, rank: int) -> int:
        """Return which slice of its rows a rank keeps, of `cp`."""
        return self.coordinate(rank).dp % self.cp

    def size(self, *kinds: str) -> int:
        """Return the number of ranks in a group of a kind.

        >>> Grid(pp=2, dp=4, tp=8).size("model"), Grid(dp=4, cp=2).size("cp")
        (16, 2)
        """
        if kinds == (CONTEXT,):
            return self.cp
        result = 1
        for axis in _axes(kinds):
            result *= self._size(axis)
        return result

    def coordinate(self, rank: int) -> Coordinate:
        """Return the coordinate of a rank; raise ValueError outside 0 … world_size - 1."""
        self._check(rank)
        stage, within = divmod(rank, self.dp * self.tp)
        return Coordinate(pp=stage, dp=within // self.tp, tp=within % self.tp)

    def rank(self, coordinate: Coordinate) -> int:
        """Return the rank at a coordinate; raise ValueError if it is outside the grid."""
        for axis in AXES:
            if not 0 <= getattr(coordinate, axis) < self._size(axis):
                raise ValueError(f"{coordinate} is outside {self}")
        return (coordinate.pp * self.dp + coordinate.dp) * self.tp + coordinate.tp

    def groups(self, *kinds: str) -> tuple[tuple[int, ...], ...]:
        """Return all groups of one kind: ranks that differ only in their index on the named axes.

        Args:
            kinds: Axes (`"pp"`, `"dp"`, `"tp"`), in any order, or keys of `KINDS`; also joined, as in `"dp-tp"`; or `"cp"` alone.

        Returns:
            Groups in row-major order of their common coordinates; the ranks of a group ascend. Each rank is in one group.
        """
        if kinds == (CONTEXT,):
            first = (group for group in self.groups("dp"))
            pieces = [group[at : at + self.cp] for group in first for at in range(0, self.dp, self.cp)]
            return tuple(sorted(pieces))
        axes = _axes(kinds)
        offsets = self._offsets(axes)
        bases = self._offsets(tuple(axis for axis in AXES if axis not in axes))
        return tuple(tuple([base + offset for offset in offsets]) for base in bases)

    def group_of(self, rank: int, *kinds: str) -> tuple[int, ...]:
        """Return the group of one kind that contains `rank`, without building the others.

        >>> Grid(pp=2, dp=2, tp=2).group_of(5, "dp", "tp")
        (4, 5, 6, 7)
        """
        if kinds == (CONTEXT,):
            group = self.group_of(rank, "dp")
            start = self.row_group(rank) * self.cp
            return group[start : start + self.cp]
        axes = _axes(kinds)
        place = self.coordinate(rank)
        base = rank - sum(getattr(place, axis) * self._stride(axis) for axis in axes)
        return tuple([base + offset for offset in self._offsets(axes)])

    def as_dict(self) -> dict[str, int]:
        """Return `{"pp": …, "dp": …, "tp": …}`, and `"cp"` where ranks share rows."""
        return {"pp": self.pp, "dp": self.dp, "tp": self.tp} | ({CONTEXT: self.cp} if self.cp > 1 else {})

    def describe(self) -> str:
        """Return the axes that split a model or a row, and the data-parallel one, as text; empty if every rank has all of both.

        >>> Grid(pp=2, dp=1, tp=4).describe(), Grid(dp=8).describe(), Grid(dp=8, cp=4).describe()
        ('pipeline 2 × data 1 × tensor 4', '', 'data 2 × context 4')
        """
        if self.size("model") * self.cp == 1:
            return ""
        sizes = {"pipeline": self.pp, "data": self.row_groups, "context": self.cp, "tensor": self.tp}
        return " × ".join(f"{name} {size}" for name, size in sizes.items() if size > 1 or name == "data")

    def describe_rank(self, rank: int) -> str:
        """Return the name of a rank, with its coordinate if ranks share a model or a row.

        >>> Grid(pp=2, tp=2).describe_rank(3), Grid(pp=2, dp=2).describe_rank(1), Grid(dp=4).describe_rank(3)
        ('rank 3 (pipeline rank 1, tensor rank 1)', 'rank 1 (pipeline rank 0, data rank 1)', 'rank 3')
        >>> Grid(dp=4, cp=2).describe_rank(3)
        'rank 3 (data rank 1, context rank 1)'
        """
        place = self.coordinate(rank)
        axes = (
            ("pipeline", self.pp, place.pp),
            ("data", self.row_groups, place.dp // self.cp),
            ("context", self.cp, place.dp % self.cp),
            ("tensor", self.tp, place.tp),
        )
        shown = [f"{name} rank {index}" for name, size, index in axes if size > 1]
        return f"rank {rank}" + (f" ({', '.join(shown)})" if self.size("model") * self.cp > 1 else "")

    def _size(self, axis: Axis) -> int:
        return {"pp": self.pp, "dp": self.dp, "tp": self.tp}[axis]

    def _stride(self, axis: Axis) -> int:
        return {"pp": self.dp * self.tp, "dp": self.tp, "tp": 1}[axis]

    def _offsets(self, axes: tuple[Axis, ...]) -> list[int]:
        """Return the distances from the first rank of a group to each of its ranks; axes outermost first, so they ascend."""
        offsets = [0]
        for axis in axes:
            steps = range(0, self._size(axis) * self._stride(axis), self._stride(axis))
            offsets = [offset + step for offset in offsets for step in steps]
        return offsets

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not in 0 … {self.world_size - 1}")


def _axes(kinds: Iterable[str]) -> tuple[Axis, ...]:
    """Return the axes of some kinds, outermost first."""
    named: set[str] = set()
    for kind in kinds:
        parts = [kind] if kind in KINDS else kind.split("-")
        for part in parts:
            if part not in KINDS:
                raise ValueError(f"{kind!r} is not a kind of group: name {join(KINDS)} or axes joined by hyphens")
            named.update(KINDS[part])
    if not named:
        raise ValueError(f"no kind of group given: name {join(KINDS)} or axes joined by hyphens")
    return tuple(axis for axis in AXES if axis in named)


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, ascending; error messages list them as the valid sizes.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [candidate for candidate in range(1, isqrt(number) + 1) if number % candidate == 0]
    return sorted({*small, *(number // candidate for candidate in small)})


def join(values: Iterable[object]) -> str:
    """Return values as a comma-separated list."""
    return ", ".join(map(str, values))


def one_of(values: Iterable[object]) -> str:
    """Return the values among which a reader may choose, as the end of `Set tensor to …`."""
    given = [str(value) for value in values]
    return f"one of {join(given)}" if len(given) > 1 else join(given)
