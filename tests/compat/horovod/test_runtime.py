"""The place of a rank on several machines, and the variables that set the pace."""

from __future__ import annotations

import pytest

import toolkit.compat.horovod as hvd
from toolkit.compat.horovod.coordinator import Pace
from toolkit.compat.horovod.errors import HorovodValueError, NotBuiltError
from toolkit.compat.horovod.runtime import Membership


def test_machines_of_unequal_size():
    nodes = ((0, 1, 2), (3,), (4, 5))
    places = {
        rank: Membership(rank=rank, local_rank=ranks.index(rank), nodes=nodes) for ranks in nodes for rank in ranks
    }
    assert [len(places[rank].node) for rank in range(6)] == [3, 3, 3, 1, 2, 2]
    assert [places[rank].across for rank in range(6)] == [[0, 1, 2], [0, 2], [0], [0, 1, 2], [0, 1, 2], [0, 2]]


def test_the_pace_is_read_from_horovods_variables(monkeypatch):
    assert Pace.from_environment() == Pace()
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "5")
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "1024")
    monkeypatch.setenv("HOROVOD_STALL_CHECK_DISABLE", "1")
    monkeypatch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "90")
    assert Pace.from_environment() == Pace(cycle_seconds=0.005, fusion_bytes=1024, warn_seconds=0.0, fail_seconds=90.0)
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "quick")
    with pytest.raises(
        HorovodValueError, match=r"HOROVOD_CYCLE_TIME='quick' is not a number of at least 0.*HOROVOD_ARGUMENT"
    ):
        Pace.from_environment()


def test_other_communicators_are_not_built():
    with pytest.raises(NotBuiltError, match=r"init\(comm=…\)"):
        hvd.init(comm=[0, 1])
    assert not hvd.is_initialized()
