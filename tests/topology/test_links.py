"""Boundaries between pipeline stages: which of their links leave a node."""

from __future__ import annotations

import doctest

import pytest

import toolkit.topology.links
from toolkit.topology import Grid, place
from toolkit.topology.links import boundaries, describe_boundaries


def test_doctests() -> None:
    result = doctest.testmod(toolkit.topology.links)
    assert result.attempted == 2
    assert result.failed == 0


@pytest.mark.parametrize("goes_round", [False, True])
@pytest.mark.parametrize(("pp", "dp", "tp", "nodes"), [(4, 2, 2, 4), (3, 2, 1, 2), (2, 8, 2, 1), (6, 1, 1, 3)])
def test_links_are_counted_one_by_one(pp: int, dp: int, tp: int, nodes: int, goes_round: bool) -> None:
    placement = place(Grid(pp=pp, dp=dp, tp=tp), num_nodes=nodes, gpus_per_node=pp * dp * tp // nodes)
    found = boundaries(placement, goes_round=goes_round)
    assert [(one.start, one.stop) for one in found] == [
        (stage, (stage + 1) % pp) for stage in range(pp if goes_round else pp - 1)
    ]
    for one in found:
        pairs = [(group[one.start], group[one.stop]) for group in placement.grid.groups("pp")]
        assert one.num_links == len(pairs) == dp * tp
        assert one.over_network == sum(placement.node(start) != placement.node(stop) for start, stop in pairs)


def test_a_grid_without_stages_has_none() -> None:
    assert boundaries(place(Grid(dp=4), num_nodes=1, gpus_per_node=4), goes_round=True) == ()


def test_alike_neighbours_share_a_line() -> None:
    placement = place(Grid(pp=8, dp=2), num_nodes=8, gpus_per_node=2)
    assert describe_boundaries(boundaries(placement)) == ("pp 0 → 1 … 6 → 7: each 2 links, over the network",)
    # Three ranks a node, two a stage: of the second boundary's links one stays.
    placement = place(Grid(pp=3, dp=2), num_nodes=2, gpus_per_node=3)
    assert describe_boundaries(boundaries(placement)) == ("pp 0 → 1, 1 → 2: each 2 links, 1 of them over the network",)
