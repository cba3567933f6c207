"""Which rank sits where: the grid of ranks, its groups, and their place on the nodes."""

from toolkit.topology.grid import AXES, KINDS, Axis, Coordinate, Grid
from toolkit.topology.placement import GroupKind, Placement, place

__all__ = ["AXES", "KINDS", "Axis", "Coordinate", "Grid", "GroupKind", "Placement", "place"]
