"""Calls in forked processes: values in order, errors as they are, and no process left, however one ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from toolkit import forks
from toolkit.forks import Fork, ForkEndedError, call_spread, num_cores


def is_left(pid: int) -> bool:
    """Return whether a process runs, or waits to be reaped."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_fork_answers_once_and_leaves_nothing() -> None:
    fork = Fork(os.getpid)
    pid = fork.result()
    assert pid != os.getpid()
    assert not is_left(pid)
    with pytest.raises(KeyError, match="a"):
        Fork(lambda: {}["a"]).result()


def test_one_that_is_killed_or_closed_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ForkEndedError):
        Fork(lambda: os.kill(os.getpid(), signal.SIGKILL)).result()

    def wait() -> None:
        (tmp_path / "pid").write_text(str(os.getpid()))
        time.sleep(60)

    fork = Fork(wait)
    wait_until(lambda: (tmp_path / "pid").is_file() and bool((tmp_path / "pid").read_text()))
    fork.close()
    fork.close()
    assert not is_left(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("processes", [1, 2, 3, 9])
def test_spread_calls_come_back_in_order_from_as_many_processes(processes: int) -> None:
    found = call_spread([partial(lambda index: (index, os.getpid()), index) for index in range(7)], processes=processes)
    assert [index for index, _ in found] == list(range(7))
    pids = {pid for _, pid in found}
    assert len(pids) == min(processes, 7)
    assert os.getpid() in pids
    assert call_spread([], processes=processes) == []


def test_where_a_call_here_fails_the_other_processes_end(tmp_path: Path) -> None:
    def wait() -> None:
        (tmp_path / "pid").write_text(str(os.getpid()))
        time.sleep(60)

    def fail() -> None:
        wait_until(lambda: (tmp_path / "pid").is_file() and bool((tmp_path / "pid").read_text()))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        call_spread([fail, wait], processes=2)
    assert not is_left(int((tmp_path / "pid").read_text()))


NESTED = """
import os, sys, time
from pathlib import Path
from toolkit.forks import Fork

def wait(name):
    Path(sys.argv[1], name).write_text(str(os.getpid()))
    time.sleep(60)

def fork_again():
    Fork(lambda: wait("inner"))
    wait("outer")

Fork(fork_again)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="prctl(2)")
def test_all_end_when_the_first_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", NESTED, str(tmp_path)]) as first:
        files = [tmp_path / name for name in ("inner", "outer")]
        wait_until(lambda: all(file.is_file() and file.read_text() for file in files))
        first.kill()
    wait_until(lambda: not any(is_running(int(file.read_text())) for file in files))


def is_running(pid: int) -> bool:
    """Return whether a process has not ended; whoever adopted it may reap it later."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_there_is_a_core() -> None:
    assert 1 <= num_cores() <= (os.cpu_count() or 1)


def test_forks_are_of_use_with_a_second_core_before_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "num_cores", lambda: 2)
    monkeypatch.setitem(sys.modules, "torch", sys)
    assert not forks.is_of_use()
    monkeypatch.delitem(sys.modules, "torch")
    assert forks.is_of_use()
    monkeypatch.setattr(forks, "num_cores", lambda: 1)
    assert not forks.is_of_use()
