"""The watch over stopped ranks, with processes that are stopped."""

from __future__ import annotations

import subprocess
import time

import psutil
import pytest

from toolkit.launch.stopped import StoppedRanks

MINUTES = 0.01
LIMIT = 1.25 * 60 * MINUTES


@pytest.fixture
def sleeper():
    process = subprocess.Popen(["sleep", "300"])
    yield psutil.Process(process.pid)
    process.kill()
    process.wait()


def looks(watch: StoppedRanks, pid: int, *, seconds: float) -> bool:
    """Whether the watch ends the run, looking all the time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if watch.look({7: pid}) is not None:
            return True
        time.sleep(0.01)
    return False


def test_only_time_in_which_the_launcher_runs_counts(sleeper):
    watch = StoppedRanks(MINUTES, "rank {}".format)
    sleeper.suspend()
    assert not looks(watch, sleeper.pid, seconds=LIMIT / 5)
    time.sleep(LIMIT)  # nobody looks, as while the launcher is stopped
    assert watch.look({7: sleeper.pid}) is None


@pytest.mark.full
def test_a_process_that_went_on_begins_anew_and_0_watches_nothing(sleeper):
    watch = StoppedRanks(MINUTES, "rank {}".format)
    sleeper.suspend()
    assert not looks(watch, sleeper.pid, seconds=0.6 * LIMIT)
    sleeper.resume()
    assert not looks(watch, sleeper.pid, seconds=0.3 * LIMIT)
    sleeper.suspend()
    assert not looks(watch, sleeper.pid, seconds=0.6 * LIMIT)
    assert looks(watch, sleeper.pid, seconds=10 * LIMIT)
    assert not looks(StoppedRanks(0, "rank {}".format), sleeper.pid, seconds=0.2)
