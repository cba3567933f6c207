import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

import toolkit.topology.placement
from toolkit.config.job import Job
from toolkit.errors import PlanError
from toolkit.topology import KINDS, Grid, place
from toolkit.topology.placement import place_job


def test_doctests():
    result = doctest.testmod(toolkit.topology.placement)
    assert result.attempted >= 3
    assert result.failed == 0


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 8), st.integers(1, 4), st.integers(1, 8))
def test_places_exactly_the_sound_grids(pp: int, dp: int, tp: int, num_nodes: int, gpus_per_node: int):
    grid = Grid(pp=pp, dp=dp, tp=tp)
    fills = grid.world_size == num_nodes * gpus_per_node
    inside = all(group[0] // gpus_per_node == group[-1] // gpus_per_node for group in grid.groups("tp"))
    if fills and inside:
        placement = place(grid, num_nodes, gpus_per_node)
        assert placement.kind("tp").inside_node
        for rank in range(grid.world_size):
            assert placement.node(rank) * gpus_per_node + placement.local_rank(rank) == rank
            assert 0 <= placement.node(rank) < num_nodes
    else:
        with pytest.raises(PlanError) as caught:
            place(grid, num_nodes, gpus_per_node)
        assert ("GRID_WORLD" in caught.value.codes) == (not fills)
        if fills:
            assert caught.value.codes == ("TP_SPANS_NODES",)


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_the_named_tensor_sizes_all_work(pp: int, dp: int, tp: int, num_nodes: int):
    grid = Grid(pp=pp, dp=dp, tp=tp)
    if grid.world_size % num_nodes:
        return
    gpus_per_node = grid.world_size // num_nodes
    try:
        place(grid, num_nodes, gpus_per_node)
    except PlanError as error:
        (problem,) = error.problems
        sizes = [int(size) for size in problem.fix.removeprefix("Set tensor to ").removeprefix("one of ").split(", ")]
        for size in sizes:
            place(Grid.from_world(world_size=grid.world_size, pp=pp, tp=size), num_nodes, gpus_per_node)


def test_spanning_tensor_group_is_named():
    with pytest.raises(PlanError) as caught:
        place(Grid(dp=4, tp=4), num_nodes=2, gpus_per_node=8 - 2)
    assert caught.value.codes == ("GRID_WORLD", "TP_SPANS_NODES")
    with pytest.raises(PlanError) as caught:
        place(Grid(dp=4, tp=3), num_nodes=3, gpus_per_node=4)
    (problem,) = caught.value.problems
    assert problem.key == "parallel.tensor"
    assert "tensor group of ranks 3 to 5 spans nodes 0 to 1" in problem.message
    assert problem.fix == "Set tensor to one of 1, 2, 4"


def test_wrong_world_says_which_data_size_fits():
    with pytest.raises(PlanError) as caught:
        place(Grid(pp=2, dp=3, tp=2), num_nodes=1, gpus_per_node=8)
    (problem,) = caught.value.problems
    assert problem.code == "GRID_WORLD"
    assert "= 12 ranks differs from nodes=1 × gpus_per_node=8 = 8 devices" in problem.message
    assert problem.fix == "Set data to 2"
    with pytest.raises(PlanError, match=r"Set pipeline × tensor to one of 1, 2, 4, 8\."):
        place(Grid(pp=3), num_nodes=1, gpus_per_node=8)
    with pytest.raises(ValueError, match="must be 1 or more"):
        place(Grid(), num_nodes=0, gpus_per_node=1)


def test_describes_where_each_kind_talks():
    kinds = {kind.kind: kind for kind in place(Grid(pp=2, dp=4, tp=4), num_nodes=4, gpus_per_node=8).describe()}
    assert list(kinds) == list(KINDS)
    assert {name: kind.max_nodes for name, kind in kinds.items()} == {
        "tp": 1, "dp": 2, "pp": 2, "model": 2, "stage": 2, "dp-pp": 4, "world": 4,
    }  # fmt: skip
    assert str(kinds["dp"]) == "dp: 8 groups of 4, over up to 2 nodes"
    assert str(kinds["tp"]) == "tp: 8 groups of 4, inside a node"
    assert place(Grid(dp=4), 2, 2).nodes((0, 3, 1)) == (0, 1)


def test_a_job_is_placed_as_its_grid_on_its_nodes():
    sections = {"model": "m", "cluster": {"gpu": "cpu", "gpus_per_node": 4, "nodes": 2}, "parallel": {"tensor": 2}}
    placed = place_job(Job.model_validate(sections))
    assert placed == place(Grid(dp=4, tp=2), num_nodes=2, gpus_per_node=4)
    assert placed.grid == Grid.of(Job.model_validate(sections))
    for tensor, code in ((3, "GRID_WORLD"), (8, "TP_SPANS_NODES")):
        with pytest.raises(PlanError) as caught:
            place_job(Job.model_validate({**sections, "parallel": {"tensor": tensor}}))
        assert caught.value.codes == (code,)
