"""One run an output folder: refused while its holder lives, taken over once that is dead, whatever the file system knows."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from toolkit.errors import PlanError, RunError
from toolkit.launch import output_lock
from toolkit.launch.lock_holder import Holder
from toolkit.launch.output_lock import LOCK, hold_output, use_problems

# Holds the folder and has a child that outlives it, as a data loader's process may.
HOLDER = """
import os, sys, time
from pathlib import Path
from toolkit.launch.output_lock import hold_output
with hold_output(Path(sys.argv[1])):
    child = os.fork()
    if child:
        print(child, flush=True)
    time.sleep(300)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    yield process
    process.kill()
    process.wait()
    os.kill(child, signal.SIGKILL)


def _refusal(folder: Path) -> str:
    with pytest.raises(RunError) as caught, hold_output(folder):
        pass
    assert caught.value.codes == ("OUTPUT_IN_USE",)
    assert caught.value.exit_code == 3
    return str(caught.value)


def test_a_second_run_is_refused_until_the_first_is_dead(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    folder = tmp_path / "run"
    before = (folder / LOCK).read_bytes()
    assert f"output_dir={folder} is in use by another run, process {holder.pid} on {socket.gethostname()}" in _refusal(
        folder
    )
    assert f"`kill {holder.pid}` there makes it save" in _refusal(folder)
    assert [problem.code for problem in use_problems(folder)] == ["OUTPUT_IN_USE"]
    assert (folder / LOCK).read_bytes() == before
    holder.kill()
    holder.wait()
    assert list(use_problems(folder)) == []
    with hold_output(folder):
        assert json.loads((folder / LOCK).read_text())["pid"] == os.getpid()
    assert list(folder.iterdir()) == []


def test_a_folder_that_was_made_for_nothing_goes_again(tmp_path: Path) -> None:
    with hold_output(tmp_path / "made" / "run"):
        pass
    assert list(tmp_path.iterdir()) == []
    with hold_output(tmp_path / "made" / "run"):
        (tmp_path / "made" / "run" / "file").write_text("")
    assert [path.name for path in (tmp_path / "made" / "run").iterdir()] == ["file"]


def test_within_a_run_its_folder_is_its_own(tmp_path: Path) -> None:
    """A rank asks again for what its launcher holds, and so does a call within a call."""
    again = f"from pathlib import Path; from toolkit.launch.output_lock import *; hold_output(Path({str(tmp_path)!r})).__enter__()"
    with hold_output(tmp_path):
        with hold_output(tmp_path):
            pass
        assert (tmp_path / LOCK).exists()
        assert list(use_problems(tmp_path)) == []
        subprocess.run([sys.executable, "-c", again], check=True, timeout=60)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_was_deleted_and_made_again_is_still_this_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_lock, "BEAT_SECONDS", 0.01)
    folder = tmp_path / "run"
    with hold_output(folder):
        shutil.rmtree(folder)
        folder.mkdir()
        deadline = time.monotonic() + 60
        while Holder.read(folder / LOCK) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        holder = Holder.read(folder / LOCK)
        assert holder is not None
        assert holder.pid == os.getpid()
    assert not (folder / LOCK).exists()


@pytest.fixture
def without_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(handle: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)


def _leave(folder: Path, **changes: object) -> Holder:
    """Leaves a lock file that nobody has locked."""
    mine = json.loads(Holder.of(psutil.Process()).as_text())
    (folder / LOCK).write_text(json.dumps(mine | changes))
    found = Holder.read(folder / LOCK)
    assert found is not None
    return found


def test_where_the_file_system_knows_no_locks_the_process_is_looked_for(tmp_path: Path, without_flock: None) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"]) as other:
        started = psutil.Process(other.pid).create_time()
        _leave(tmp_path, pid=other.pid, started=started)
        assert f"process {other.pid} on" in _refusal(tmp_path)
        _leave(tmp_path, pid=other.pid, started=started - 3600)  # the number was given again
        with hold_output(tmp_path):
            pass
        _leave(tmp_path, pid=other.pid, started=started)
        other.kill()
        other.wait()
    with hold_output(tmp_path):
        pass


def _beating(path: Path) -> Callable[[], None]:
    stopped = threading.Event()

    def beat() -> None:
        while not stopped.wait(0.05):
            os.utime(path)

    thread = threading.Thread(target=beat)
    thread.start()

    def stop() -> None:
        stopped.set()
        thread.join()

    return stop


def test_a_run_of_another_machine_is_dead_once_it_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The lock may be of a file system that keeps it on one machine."""
    monkeypatch.setattr(output_lock, "SILENCE_SECONDS", 2.0)
    _leave(tmp_path, host="node7", machine="another")
    stop = _beating(tmp_path / LOCK)
    assert [problem.code for problem in use_problems(tmp_path)] == ["OUTPUT_IN_USE"]
    assert f"process {os.getpid()} on node7" in _refusal(tmp_path)
    assert f"was in use by process {os.getpid()} on node7" in capsys.readouterr().err
    stop()
    old = time.time() - 10
    os.utime(tmp_path / LOCK, (old, old))
    with hold_output(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["host"] == socket.gethostname()
    assert capsys.readouterr().err == "", "it was silent for long"


def test_a_holder_shows_that_it_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_lock, "BEAT_SECONDS", 0.02)
    with hold_output(tmp_path):
        os.utime(tmp_path / LOCK, (0, 0))
        deadline = time.monotonic() + 60
        while (tmp_path / LOCK).stat().st_mtime == 0:
            assert time.monotonic() < deadline


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"pid": 1}', '{"host": "a", "machine": "b", "pid": 1, "started": 1e300}', '{"host": "\\ud800"}'],
)
def test_a_lock_file_that_says_nothing_is_nobodys(tmp_path: Path, text: str) -> None:
    (tmp_path / LOCK).write_text(text)
    assert list(use_problems(tmp_path)) == []
    with hold_output(tmp_path):
        pass


def test_an_end_takes_away_its_own_lock_alone(tmp_path: Path) -> None:
    with hold_output(tmp_path / "run"):
        (tmp_path / "run" / LOCK).unlink()
        (tmp_path / "run" / LOCK).write_text("of a run that has begun in a folder of the same name")
    assert (tmp_path / "run" / LOCK).exists()


def test_ctrl_c_leaves_the_lock_of_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def press(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", press)
    _leave(tmp_path, host="node7", machine="another")
    before = (tmp_path / LOCK).read_bytes()
    with pytest.raises(KeyboardInterrupt), hold_output(tmp_path):
        pass
    assert (tmp_path / LOCK).read_bytes() == before


def test_a_holder_that_ends_while_it_is_looked_at_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = _leave(tmp_path, host="node7", machine="another")
    (tmp_path / LOCK).unlink()
    monkeypatch.setattr(Holder, "read", lambda path: holder)
    assert list(use_problems(tmp_path)) == []


def test_a_lock_that_cannot_be_written_is_a_folder_that_cannot(tmp_path: Path) -> None:
    (tmp_path / LOCK).mkdir()
    with pytest.raises(PlanError, match="cannot be written: Is a directory") as caught, hold_output(tmp_path):
        pass
    assert caught.value.codes == ("OUTPUT_WRITE",)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "run", Path("/proc/run")):
        with pytest.raises(PlanError) as caught, hold_output(folder):
            pass
        assert caught.value.codes == ("OUTPUT_WRITE",)
