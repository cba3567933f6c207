"""The grid of ranks, its process groups, and their placement on nodes."""

from toolkit.topology.grid import AXES, KINDS, Axis, Coordinate, Grid
from toolkit.topology.placement import GroupKind, Placement, place

__all__ = ["AXES", "KINDS", "Axis", "Coordinate", "Grid", "GroupKind", "Placement", "place"]
