"""Horovod's variables: those that set the pace, and those that are named since they have no effect."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

import toolkit.compat.horovod as hvd
from toolkit.compat.horovod import variables
from toolkit.compat.horovod.errors import HorovodValueError
from toolkit.compat.horovod.variables import Pace

PAGE = Path(__file__).parents[3] / "docs" / "horovod.md"


def test_the_pace_is_read_from_horovods_variables(monkeypatch):
    assert Pace.from_environment() == Pace()
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "5")
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "1024")
    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", "30")
    monkeypatch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "90")
    read = Pace(cycle_seconds=0.005, fusion_bytes=1024, warn_seconds=30.0, fail_seconds=90.0)
    assert Pace.from_environment() == read
    monkeypatch.setenv("HOROVOD_STALL_CHECK_DISABLE", "0")
    assert Pace.from_environment() == read
    monkeypatch.setenv("HOROVOD_STALL_CHECK_DISABLE", "1")
    assert Pace.from_environment() == Pace(cycle_seconds=0.005, fusion_bytes=1024, warn_seconds=0.0, fail_seconds=0.0)
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "quick")
    with pytest.raises(
        HorovodValueError, match=r"HOROVOD_CYCLE_TIME='quick' is not a number of at least 0.*HOROVOD_ARGUMENT"
    ):
        Pace.from_environment()


def test_variables_without_effect_are_named_by_init(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "1")
    monkeypatch.setenv("HOROVOD_AUTOTUNE", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        variables.warn_without_effect()
    monkeypatch.setenv("HOROVOD_TIMELINE", "trace.json")
    monkeypatch.setenv("HOROVOD_AUTOTUNE", "1")
    with pytest.warns(RuntimeWarning, match=r"^HOROVOD_AUTOTUNE=1, HOROVOD_TIMELINE=trace.json: .*docs/horovod.md"):
        hvd.init()
    hvd.shutdown()


def test_the_page_names_all_variables():
    page = set(re.findall(r"HOROVOD_[A-Z0-9_]+", PAGE.read_text()))
    source = set(re.findall(r"\"(HOROVOD_[A-Z0-9_]+)\"", Path(variables.__file__).read_text()))
    assert source <= page, sorted(source - page)
