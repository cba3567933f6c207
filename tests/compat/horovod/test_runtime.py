"""The place of a rank on several machines."""

from __future__ import annotations

import pytest

import toolkit.compat.horovod as hvd
from toolkit.compat.horovod.errors import NotBuiltError
from toolkit.compat.horovod.runtime import Membership


def test_machines_of_unequal_size():
    nodes = ((0, 1, 2), (3,), (4, 5))
    places = {
        rank: Membership(rank=rank, local_rank=ranks.index(rank), nodes=nodes) for ranks in nodes for rank in ranks
    }
    assert [len(places[rank].node) for rank in range(6)] == [3, 3, 3, 1, 2, 2]
    assert [places[rank].across for rank in range(6)] == [[0, 1, 2], [0, 2], [0], [0, 1, 2], [0, 1, 2], [0, 2]]


def test_other_communicators_are_not_built():
    with pytest.raises(NotBuiltError, match=r"init\(comm=…\)"):
        hvd.init(comm=[0, 1])
    assert not hvd.is_initialized()
