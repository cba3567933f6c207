"""Placement of the ranks of a grid: they use all cards, and a tensor group stays inside a node."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.errors import PlanError, Problem
from toolkit.planning.unchecked_plan import UncheckedPlan
from toolkit.topology.placement import place_job


def grid_on_nodes(draft: UncheckedPlan) -> Iterator[Problem]:
    """Require that stages times tensor ranks divide the cards, and that no tensor group spans two nodes."""
    try:
        place_job(draft.job)
    except PlanError as error:
        yield from error.problems


RULES = (grid_on_nodes,)
