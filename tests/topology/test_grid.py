import doctest
import itertools
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import toolkit.topology.grid
from toolkit.errors import PlanError
from toolkit.topology import AXES, KINDS, Coordinate, Grid

grids = st.builds(Grid, pp=st.integers(1, 6), dp=st.integers(1, 6), tp=st.integers(1, 6))
axis_sets = st.sets(st.sampled_from(AXES), min_size=1).map(sorted)


def test_doctests():
    result = doctest.testmod(toolkit.topology.grid)
    assert result.attempted >= 6
    assert result.failed == 0


@given(grids, st.sampled_from(sorted(KINDS)))
def test_each_kind_partitions_the_world(grid: Grid, kind: str):
    groups = grid.groups(kind)
    assert sorted(itertools.chain(*groups)) == list(range(grid.world_size))
    assert {len(group) for group in groups} == {grid.size(kind)}
    assert all(list(group) == sorted(group) for group in groups)


@given(grids, axis_sets, st.data())
def test_a_group_differs_only_on_its_axes(grid: Grid, axes: list[str], data: st.DataObject):
    rank = data.draw(st.integers(0, grid.world_size - 1))
    group = grid.group_of(rank, *axes)
    assert [g for g in grid.groups(*axes) if rank in g] == [group]
    assert grid.groups(*axes) == grid.groups("-".join(reversed(axes)))
    fixed = [axis for axis in AXES if axis not in axes]
    place = grid.coordinate(rank)
    like = [
        r for r in range(grid.world_size) if all(getattr(grid.coordinate(r), a) == getattr(place, a) for a in fixed)
    ]
    assert list(group) == like


@given(grids)
def test_rank_and_coordinate_are_inverse_and_tp_runs_fastest(grid: Grid):
    places = [grid.coordinate(rank) for rank in range(grid.world_size)]
    assert [grid.rank(place) for place in places] == list(range(grid.world_size))
    assert places == sorted(places)  # row by row through (pp, dp, tp)


@settings(max_examples=40, deadline=None)
@given(grids)
def test_equals_deepspeed(grid: Grid):
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    theirs = PipeModelDataParallelTopology(num_pp=grid.pp, num_mp=grid.tp, num_dp=grid.dp)
    assert theirs.world_size() == grid.world_size
    for ours, name in (("pp", "pipe"), ("dp", "data"), ("tp", "model")):
        assert [list(group) for group in grid.groups(ours)] == theirs.get_axis_comm_lists(name)
    for rank in range(grid.world_size):
        place = grid.coordinate(rank)
        assert tuple(theirs.get_coord(rank)) == (place.pp, place.dp, place.tp)
        assert theirs.get_rank(pipe=place.pp, data=place.dp, model=place.tp) == rank
    for stage in range(grid.pp):
        assert list(grid.groups("stage")[stage]) == theirs.filter_match(pipe=stage)
    for replica in range(grid.dp):
        assert list(grid.groups("model")[replica]) == theirs.filter_match(data=replica)


def test_names_of_kinds_are_equal_to_their_axes():
    grid = Grid(pp=3, dp=2, tp=4)
    assert grid.groups("model") == grid.groups("pp-tp") == grid.groups("tp", "pp")
    assert grid.groups("stage") == grid.groups("dp-tp")
    assert grid.groups("world") == grid.groups("pp", "dp", "tp") == (tuple(range(24)),)
    assert grid.groups("model", "dp") == grid.groups("world")


def test_hundred_thousand_ranks():
    grid = Grid(pp=10, dp=1250, tp=8)
    assert sum(len(grid.groups(kind)) * grid.size(kind) for kind in KINDS) == len(KINDS) * 100_000


def test_from_world_derives_data_or_says_what_divides():
    assert Grid.from_world(world_size=24, pp=3, tp=4) == Grid(pp=3, dp=2, tp=4)
    with pytest.raises(PlanError) as caught:
        Grid.from_world(world_size=8, pp=3)
    (problem,) = caught.value.problems
    assert problem.code == "GRID_WORLD"
    assert "= 3 ranks do not divide nodes × gpus_per_node = 8 ranks" in problem.message
    assert problem.fix == (
        "Set pipeline × tensor to one of 1, 2, 4, 8, or gpus_per_node so that nodes × gpus_per_node is a multiple of 3"
    )


def test_faults():
    with pytest.raises(PlanError) as caught:
        Grid(pp=0, tp=-1)
    assert caught.value.codes == ("GRID_SIZE", "GRID_SIZE")
    grid = Grid(dp=2)
    with pytest.raises(ValueError, match="rank 2"):
        grid.coordinate(2)
    with pytest.raises(ValueError, match="outside"):
        grid.rank(Coordinate(pp=0, dp=2, tp=0))
    with pytest.raises(ValueError, match="'ep' is not a kind"):
        grid.groups("ep")
    with pytest.raises(ValueError, match="no kind of group"):
        grid.groups()


def test_needs_no_torch():
    import subprocess

    code = "import sys, toolkit.topology, toolkit.topology.table; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_ranks_that_share_rows_are_neighbours_of_the_data_axis():
    grid = Grid.from_world(world_size=16, tp=2, cp=2)
    assert (grid.dp, grid.row_groups, grid.size("cp"), grid.size("dp")) == (8, 4, 2, 8)
    assert grid.groups("cp")[:2] == ((0, 2), (1, 3))
    assert "cp" in grid.kinds
    assert "cp" not in Grid(dp=4).kinds
    for rank in range(16):
        group = grid.group_of(rank, "cp")
        assert group[grid.context_rank(rank)] == rank
        assert {grid.row_group(other) for other in group} == {grid.row_group(rank)}
        assert set(group) <= set(grid.group_of(rank, "dp"))
    with pytest.raises(PlanError, match="each row needs all of its ranks") as caught:
        Grid.from_world(world_size=6, cp=4)
    assert caught.value.codes == ("GRID_WORLD",)
    with pytest.raises(PlanError) as caught:
        Grid(dp=3, cp=2)
    assert caught.value.codes == ("GRID_SIZE",)
