from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from toolkit.launch.watchdog import Watchdog


@pytest.fixture
def sleeper():
    process = subprocess.Popen(["sleep", "300"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def watchdog_pid() -> int:
    give_up = time.monotonic() + 60
    while time.monotonic() < give_up:  # a process that has only just been started may show no command line yet
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):  # another test's, which has just ended
                if "-I" in child.cmdline():
                    return child.pid
        time.sleep(0.005)
    raise AssertionError("there is no watchdog")


def ignores(pid: int, number: int) -> bool:
    (mask,) = re.findall(r"SigIgn:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_it_kills_nothing_that_was_released(sleeper):
    with Watchdog() as watchdog:
        watchdog.watch(sleeper.pid)
        watchdog.release(sleeper.pid)
    assert sleeper.poll() is None


def test_it_kills_a_group_when_the_pipe_closes(sleeper):
    with Watchdog() as watchdog:
        watchdog.watch(sleeper.pid)
    assert sleeper.wait(timeout=100) == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_it_survives_signals_to_the_whole_job(sleeper, number):
    with Watchdog() as watchdog:
        watchdog.watch(sleeper.pid)
        pid = watchdog_pid()
        while not ignores(pid, number):
            time.sleep(0.005)
        os.kill(pid, number)
    assert sleeper.wait(timeout=100) == -signal.SIGKILL


def test_the_run_goes_on_without_it(sleeper):
    with Watchdog() as watchdog:
        watchdog.watch(sleeper.pid)
        os.kill(watchdog_pid(), signal.SIGKILL)
        time.sleep(0.1)
        watchdog.release(sleeper.pid)
        watchdog.release(sleeper.pid)
    assert sleeper.poll() is None
