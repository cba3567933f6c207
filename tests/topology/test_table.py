import doctest
import json

import toolkit.topology.table
from toolkit.topology import KINDS, Grid, place
from toolkit.topology.table import HEADER, rows, to_dict

PLACEMENT = place(Grid(pp=2, dp=3, tp=4), num_nodes=3, gpus_per_node=8)


def test_doctests():
    result = doctest.testmod(toolkit.topology.table)
    assert result.attempted >= 4
    assert result.failed == 0


def test_rows_agree_with_the_grid():
    table = rows(PLACEMENT)
    assert [row.rank for row in table] == list(range(24))
    for row in table:
        assert row.coordinate == PLACEMENT.grid.coordinate(row.rank)
        assert (row.node, row.local_rank) == divmod(row.rank, 8)
        for axis in ("tp", "dp", "pp"):
            assert getattr(row, f"{axis}_group") == PLACEMENT.grid.group_of(row.rank, axis)
        assert len(row.cells()) == len(HEADER)


def test_ranks_of_a_group_share_one_tuple():
    table = rows(PLACEMENT)
    assert table[0].dp_group is table[4].dp_group


def test_json_round_trip_holds_every_group():
    document = json.loads(json.dumps(to_dict(PLACEMENT)))
    assert document["grid"] == {"pp": 2, "dp": 3, "tp": 4}
    assert document["world_size"] == 24
    assert document["ranks"][13] == {"rank": 13, "node": 1, "local_rank": 5, "coordinate": {"pp": 1, "dp": 0, "tp": 1}}
    assert list(document["groups"]) == list(KINDS)
    for kind, described in document["groups"].items():
        assert [tuple(group) for group in described["ranks"]] == list(PLACEMENT.grid.groups(kind))
        assert described["num_groups"] * described["size"] == 24
        assert described["inside_node"] == (described["max_nodes"] == 1)
