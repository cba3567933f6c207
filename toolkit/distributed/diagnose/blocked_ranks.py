"""Analysis of which rank waits for which, among ranks that take steps together; without process groups or torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.errors import CheckError
from toolkit.topology.grid import Grid
from toolkit.topology.table import name_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One operation of a group's ranks together.

    Args:
        kind: Kind of the group, as in `KINDS`.
        operation: Name of the operation, such as `all-reduce`; unique within a kind.
    """

    kind: str
    operation: str

    @property
    def name(self) -> str:
        """Unique name among all steps."""
        return f"{self.kind} {self.operation}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The progress of a rank.

    Args:
        entered: Names of the steps that it has entered, in order.
        is_inside: Whether it is still inside the last of them.
    """

    entered: tuple[str, ...] = ()
    is_inside: bool = False

    def __str__(self) -> str:
        if not self.entered:
            return "not started"
        return f"{'in' if self.is_inside else 'past'} {self.entered[-1]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Ranks of one group that wait in one step.

    Args:
        step: Step in which they wait.
        group: All ranks of the group.
        waiting: Ranks that have entered the step.
        missing: Ranks that have not, each with its place; empty if all have entered but their data does not move.
    """

    step: Step
    group: tuple[int, ...]
    waiting: tuple[int, ...]
    missing: tuple[tuple[int, Place], ...]

    def __str__(self) -> str:
        who = f"{name_ranks(self.waiting)} {'wait' if len(self.waiting) > 1 else 'waits'} in {self.step.operation} of "
        who += f"{self.step.kind} ({name_ranks(self.group)})"
        return f"{who} {self.for_whom()}"

    def for_whom(self) -> str:
        """Return text on the ranks that they wait for and where those are."""
        if not self.missing:
            return "though all have arrived: no data is transferred"
        places: dict[str, list[int]] = {}
        for rank, place in self.missing:
            places.setdefault(str(place), []).append(rank)
        return "for " + ", and ".join(f"{name_ranks(ranks)} ({place})" for place, ranks in places.items())

    def as_dict(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        return {
            "kind": self.step.kind,
            "operation": self.step.operation,
            "group": list(self.group),
            "waiting": list(self.waiting),
            "missing": [{"rank": rank, "place": str(place)} for rank, place in self.missing],
        }


def find_blocked(grid: Grid, steps: Sequence[Step], places: Mapping[int, Place]) -> tuple[Wait, ...]:
    """Find the ranks that are inside a step, and the ranks of their groups that have not entered it.

    Args:
        grid: Grid of all ranks.
        steps: Every step, in the order in which a rank takes them.
        places: Place of every rank.

    Returns:
        One wait per group and step, in the order of steps: later ones depend on the first. Steps that all ranks have entered
        come last, since most of them only notice late that others are stuck.
    """
    found = []
    for step in steps:
        inside = {rank for rank, place in places.items() if place.is_inside and place.entered[-1] == step.name}
        for group in grid.groups(step.kind) if inside else ():
            waiting = tuple(rank for rank in group if rank in inside)
            missing = tuple((rank, places[rank]) for rank in group if step.name not in places[rank].entered)
            if waiting:
                found.append(Wait(step=step, group=group, waiting=waiting, missing=missing))
    return tuple(sorted(found, key=lambda wait: not wait.missing))


def hang_error(waits: Sequence[Wait], *, seconds: float) -> CheckError:
    """Return the error of ranks that hang: its message describes the first wait, which causes the others."""
    more = len(waits) - 1
    others = f"; {more} more group{'s' if more > 1 else ''} wait{'' if more > 1 else 's'} too" if more > 0 else ""
    first = waits[0] if waits else "every rank is between two operations"
    absent = [rank for rank, _ in waits[0].missing] if waits else []
    who = name_ranks(absent or (waits[0].waiting if waits else ()))
    return CheckError.of(
        code="GROUP_HANG",
        message=f"no rank has made progress for {seconds:g} s: {first}{others}",
        fix=f"Check the output, the node and the network of {who or 'all ranks'}; with GPUs, NCCL_DEBUG=INFO shows "
        "how they connect. If ranks are only slow, give a longer --timeout",
    )
