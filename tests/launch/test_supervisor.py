"""The supervisor with real processes: tiny Python scripts, real signals."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from toolkit.errors import RunError
from toolkit.launch.outcome import read_worker_error
from toolkit.launch.supervisor import supervise

PRELUDE = """
import os, signal, subprocess, sys, time
from pathlib import Path
rank, folder = int(os.environ["RANK"]), Path(os.environ["FOLDER"])
def ready():
    (folder / f"ready-{rank}").write_text(str(os.getpid()))
def wait_for(*ranks):
    while not all((folder / f"ready-{r}").exists() for r in ranks):
        time.sleep(0.005)
"""
SUPERVISOR = """
import os, sys
from pathlib import Path
from toolkit.launch.supervisor import TrainerRanks, supervise
folder = Path(sys.argv[1])
outcome = supervise(
    [sys.executable, "-S", str(folder / "worker.py")],
    ranks=range(2),
    env_for_rank=lambda rank: {**os.environ, "RANK": str(rank), "FOLDER": str(folder)},
    log_dir=folder / "logs",
    trainer=(trainer := eval(sys.argv[2]) if sys.argv[2:] else None),
    grace_seconds=0.0 if trainer else 10.0,
)
print("FAILURE", outcome.failure and outcome.failure.ended_by, flush=True)
sys.exit(outcome.exit_code)
"""


def worker(folder: Path, body: str) -> list[str]:
    (folder / "worker.py").write_text(PRELUDE + textwrap.dedent(body))
    return [sys.executable, "-S", str(folder / "worker.py")]


def run(folder: Path, body: str, *, ranks=range(2), grace_seconds=10.0):
    return supervise(
        worker(folder, body),
        ranks=ranks,
        env_for_rank=lambda rank: {**os.environ, "RANK": str(rank), "FOLDER": str(folder), "PYTHONUNBUFFERED": "1"},
        log_dir=folder / "logs",
        grace_seconds=grace_seconds,
    )


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def pid_in(path: Path) -> int:
    give_up = time.monotonic() + 60
    while not path.exists() or not path.read_text():
        assert time.monotonic() < give_up, f"{path.name} never came"
        time.sleep(0.005)
    return int(path.read_text())


def all_gone(*pids: int) -> bool:
    give_up = time.monotonic() + 60
    while any(map(is_alive, pids)) and time.monotonic() < give_up:
        time.sleep(0.01)
    return not any(map(is_alive, pids))


def hears_hang_ups() -> None:
    """As in a terminal: tests that are started by `nohup` would leave it to be ignored."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def start(tmp_path):
    """Starts a supervisor of two workers in a process of its own, once both workers are ready."""
    started = []

    def start_with(body: str, trainer: str = "None") -> subprocess.Popen[str]:
        worker(tmp_path, body)
        path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
        process = subprocess.Popen(
            [sys.executable, "-c", SUPERVISOR, str(tmp_path), trainer],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=hears_hang_ups,
        )
        started.append(process)
        for rank in range(2):
            pid_in(tmp_path / f"ready-{rank}")
        return process

    yield start_with
    for process in started:
        process.kill()
        process.communicate()


def test_ranks_that_end_well_are_waited_for(tmp_path, capfd):
    outcome = run(tmp_path, "time.sleep(0.2 * rank); print('out', rank); print('err', rank, file=sys.stderr)")
    assert (outcome.exit_code, outcome.interrupted, outcome.failure) == (0, False, None)
    assert capfd.readouterr() == ("out 0\n", "err 0\n")
    assert (tmp_path / "logs/rank-1.log").read_text() == "out 1\nerr 1\n"
    assert not (tmp_path / "logs/rank-0.log").exists()


def test_the_ranks_of_a_second_node_have_global_numbers(tmp_path):
    run(tmp_path, "print(rank)", ranks=range(4, 7))
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["rank-5.log", "rank-6.log"]


def test_a_rank_that_exits_7_ends_the_others(tmp_path):
    began = time.monotonic()
    outcome = run(
        tmp_path,
        "ready(); wait_for(0, 1); print('last words') if rank else 0; sys.exit(7) if rank else time.sleep(300)",
    )
    assert time.monotonic() - began < 100
    assert (outcome.exit_code, outcome.failure.rank, outcome.failure.ended_by) == (3, 1, "exit code 7")
    assert outcome.failure.last_lines == ("last words",)
    assert outcome.failure.log_file == tmp_path / "logs/rank-1.log"
    assert all_gone(pid_in(tmp_path / "ready-0"), pid_in(tmp_path / "ready-1"))


def test_a_killed_rank_is_named_with_a_hint(tmp_path):
    outcome = run(
        tmp_path, "ready(); wait_for(0, 1); os.kill(os.getpid(), signal.SIGKILL) if rank else time.sleep(300)"
    )
    assert (outcome.failure.rank, outcome.failure.ended_by) == (1, "SIGKILL")
    assert "out-of-memory" in outcome.failure.problems[0].fix


def test_rank_0_can_be_the_one_that_fails(tmp_path):
    outcome = run(tmp_path, "sys.exit(4) if rank == 0 else time.sleep(300)")
    assert (outcome.failure.rank, outcome.failure.log_file) == (0, None)
    assert "above" in outcome.failure.problems[0].fix


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace(tmp_path):
    began = time.monotonic()
    outcome = run(
        tmp_path,
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ready(); wait_for(0, 1)
        sys.exit(7) if rank == 0 else time.sleep(300)
        """,
        grace_seconds=0.3,
    )
    assert 0.3 <= time.monotonic() - began < 100
    assert outcome.failure.rank == 0
    assert all_gone(pid_in(tmp_path / "ready-1"))


def test_grandchildren_end_with_their_worker(tmp_path):
    run(
        tmp_path,
        """
        child = subprocess.Popen(["sleep", "300"])
        (folder / f"grandchild-{rank}").write_text(str(child.pid))
        ready(); wait_for(0, 1)
        sys.exit(7) if rank else os.kill(os.getpid(), signal.SIGSTOP)
        """,
        grace_seconds=0.1,
    )
    assert all_gone(*(pid_in(tmp_path / f"grandchild-{rank}") for rank in range(2)))


def test_a_workers_own_error_is_read(tmp_path):
    outcome = run(
        tmp_path,
        f"""
        sys.path.insert(0, {str(Path(__file__).parents[2])!r})
        from toolkit.errors import DataError
        from toolkit.launch.outcome import write_worker_error
        if rank == 0:
            error = DataError.of(code="SOME_CODE", message="no rows", fix="Give rows")
            sys.exit(write_worker_error(folder / "logs", rank, error))
        time.sleep(300)
        """,
    )
    assert (outcome.exit_code, outcome.failure.describe()) == (2, "no rows. Give rows. [SOME_CODE]")


def test_an_error_of_an_earlier_run_is_not_this_ones(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/error-rank-0.json").write_text("{}")
    (tmp_path / "logs/rank-1.log").write_text("old")
    outcome = run(tmp_path, "sys.exit(0 if rank else 5)")
    assert outcome.failure.error is None
    assert (tmp_path / "logs/rank-1.log").read_text() == ""


def test_a_command_that_does_not_exist(tmp_path):
    with pytest.raises(RunError) as caught:
        supervise(["no-such-command"], ranks=[0], env_for_rank=lambda rank: {"PATH": ""}, log_dir=tmp_path)
    assert caught.value.codes == ("WORKER_START",)


def test_a_log_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError) as caught:
        supervise(["true"], ranks=[0], env_for_rank=lambda rank: {}, log_dir=tmp_path / "file")
    assert caught.value.codes == ("LOG_DIR",)


def test_workers_end_when_starting_the_rest_fails(tmp_path):
    def env_for_rank(rank: int) -> dict[str, str]:
        if rank == 1:
            pid_in(tmp_path / "ready-0")
            raise LookupError(rank)
        return {"RANK": "0", "FOLDER": str(tmp_path)}

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(LookupError):
        supervise(
            worker(tmp_path, "ready(); time.sleep(300)"),
            ranks=range(2),
            env_for_rank=env_for_rank,
            log_dir=tmp_path / "logs",
        )
    assert all_gone(pid_in(tmp_path / "ready-0"))
    assert signal.getsignal(signal.SIGINT) is before


SAVES = """
def save(number, frame):
    time.sleep(0.3)
    with (folder / f"saved-{rank}").open("a") as file: file.write("saved")
    sys.exit(0)
signal.signal(signal.SIGINT, save)
ready()
time.sleep(300)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_lets_workers_save(tmp_path, start, number):
    supervisor = start(SAVES)
    supervisor.send_signal(number)
    output, told = supervisor.communicate(timeout=100)
    assert supervisor.returncode == 130
    assert "FAILURE None" in output
    assert told.count("each rank was sent SIGINT and ends as its script does; once more to kill them") == 1
    assert [(tmp_path / f"saved-{rank}").read_text() for rank in range(2)] == ["saved", "saved"]


def test_one_press_that_arrives_twice_is_one(tmp_path, start):
    saved = tmp_path / "saved-0"
    for _ in range(5):  # on a busy machine what is sent twice may be read so late that it is two presses
        for path in tmp_path.glob("ready-*"):
            path.unlink()
        supervisor = start(SAVES)
        supervisor.send_signal(signal.SIGINT)
        time.sleep(0.05)
        supervisor.send_signal(signal.SIGINT)
        supervisor.communicate(timeout=100)
        if saved.exists():
            break
    assert saved.read_text() == "saved"


LISTENS = """
def save(number, frame):
    with (folder / f"saved-{rank}").open("a") as file: file.write("saved")
signal.signal(signal.SIGUSR1, save)
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
ready()
while True: time.sleep(300)
"""


def test_ranks_of_training_are_asked_to_save_and_then_have_so_many_seconds_to_end(tmp_path, start):
    """One rank hears of a save, and tells the others at its next step."""
    supervisor = start(LISTENS, trainer="TrainerRanks(asked_seconds=0.5)")
    for number in range(1, 3):
        supervisor.send_signal(signal.SIGUSR1)
        give_up = time.monotonic() + 60
        while not (path := tmp_path / "saved-0").exists() or path.read_text() != "saved" * number:
            assert time.monotonic() < give_up
            time.sleep(0.01)
        time.sleep(0.4)  # the same signal within a moment is one press
    assert supervisor.poll() is None
    assert not (tmp_path / "saved-1").exists()
    supervisor.send_signal(signal.SIGTERM)
    output, told = supervisor.communicate(timeout=100)
    assert (supervisor.returncode, "FAILURE None" in output) == (130, True)
    assert told.count("SIGUSR1: each rank finishes its step, saves and goes on") == 2
    assert all_gone(*(pid_in(tmp_path / f"ready-{rank}") for rank in range(2)))


ENDS_BY_ITSELF = """
def asked(*_):
    (folder / "heard").touch()
    sys.exit(130)
signal.signal(signal.SIGINT, asked)
ready()
wait_for(0, 1)
if rank == 0: sys.exit(130)
time.sleep(300)
"""


def test_a_rank_of_training_that_was_asked_elsewhere_ends_the_run_as_asked(tmp_path, start):
    """A signal to another node's launcher ends all ranks after one step; a rank that was alone in it leaves none waiting."""
    supervisor = start(ENDS_BY_ITSELF, trainer="TrainerRanks()")
    output, _ = supervisor.communicate(timeout=100)
    assert (supervisor.returncode, "FAILURE None" in output) == (130, True)
    assert (tmp_path / "heard").exists()


STUBBORN = """
for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, signal.SIG_IGN)
ready()
time.sleep(300)
"""


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_kills_at_once(tmp_path, start, second):
    supervisor = start(STUBBORN)
    supervisor.send_signal(signal.SIGINT)
    while "once more to kill them" not in supervisor.stderr.readline():
        assert supervisor.poll() is None
    time.sleep(0.4)  # it has read the first: what comes now is another press
    assert supervisor.poll() is None
    supervisor.send_signal(second)
    output, _ = supervisor.communicate(timeout=100)
    assert (supervisor.returncode, "FAILURE None" in output) == (130, True)
    assert all_gone(*(pid_in(tmp_path / f"ready-{rank}") for rank in range(2)))


def test_workers_without_a_handler_end_on_the_first_signal(start):
    supervisor = start("signal.signal(signal.SIGINT, signal.SIG_DFL); ready(); time.sleep(300)")
    supervisor.send_signal(signal.SIGINT)
    output, _ = supervisor.communicate(timeout=100)
    assert (supervisor.returncode, "FAILURE None" in output) == (130, True)


def test_a_failure_while_saving_is_a_failure(start):
    supervisor = start(
        "signal.signal(signal.SIGINT, lambda *_: sys.exit(5) if rank else None); ready(); time.sleep(300)"
    )
    supervisor.send_signal(signal.SIGINT)
    output, _ = supervisor.communicate(timeout=100)
    assert (supervisor.returncode, "FAILURE exit code 5" in output) == (3, True)


STOPPED_MINUTES = 0.008


@pytest.mark.parametrize("stopped", [pytest.param([1], marks=pytest.mark.full), [0, 1]])
def test_ranks_that_stay_stopped_end_the_run_and_are_named(tmp_path, start, stopped):
    supervisor = start("ready(); time.sleep(300)", trainer=f"TrainerRanks(hang_timeout_minutes={STOPPED_MINUTES})")
    pids = [pid_in(tmp_path / f"ready-{rank}") for rank in range(2)]
    for rank in stopped:
        os.kill(pids[rank], signal.SIGSTOP)
    _, told = supervisor.communicate(timeout=100)
    assert supervisor.returncode == 3, told
    [problem] = read_worker_error(tmp_path / "logs", stopped[0]).problems
    assert problem.code == "RUN_HANG"
    for rank in range(2):
        assert (f"process {pids[rank]} of rank {rank} is stopped (SIGSTOP" in problem.message) == (rank in stopped)
    assert problem.message.endswith("1 other of this machine runs") == (len(stopped) == 1)
    assert all_gone(*pids)


@pytest.mark.full
def test_a_launcher_that_is_stopped_itself_ends_nothing(tmp_path, start):
    supervisor = start("ready(); time.sleep(300)", trainer=f"TrainerRanks(hang_timeout_minutes={4 * STOPPED_MINUTES})")
    pids = [pid_in(tmp_path / f"ready-{rank}") for rank in range(2)]
    for pid in (*pids, supervisor.pid):
        os.kill(pid, signal.SIGSTOP)
    time.sleep(2 * 1.25 * 60 * 4 * STOPPED_MINUTES)
    supervisor.send_signal(signal.SIGCONT)
    time.sleep(0.5)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    time.sleep(0.5)
    assert supervisor.poll() is None
    assert all(map(is_alive, pids))


def test_a_second_ctrl_c_ends_a_run_of_which_every_process_is_stopped(start):
    """Also the one that would end the ranks if this supervisor were killed."""
    supervisor = start("ready(); time.sleep(300)")
    children = psutil.Process(supervisor.pid).children()
    assert len(children) == 3
    for child in children:
        child.suspend()
    supervisor.send_signal(signal.SIGINT)
    while "once more to kill them" not in supervisor.stderr.readline():
        assert supervisor.poll() is None
    time.sleep(0.4)  # it has read the first: what comes now is another press
    supervisor.send_signal(signal.SIGINT)
    supervisor.communicate(timeout=20)
    assert supervisor.returncode == 130
    assert all_gone(*(child.pid for child in children))


def test_nothing_outlives_a_supervisor_that_is_killed(tmp_path, start):
    supervisor = start(
        """
        child = subprocess.Popen(["sleep", "300"])
        (folder / f"grandchild-{rank}").write_text(str(child.pid))
        ready()
        time.sleep(300)
        """
    )
    pids = [pid_in(tmp_path / f"{kind}-{rank}") for kind in ("ready", "grandchild") for rank in range(2)]
    assert all(map(is_alive, pids))
    supervisor.kill()
    supervisor.wait()
    assert all_gone(*pids)


DRAWS = """
if rank == 0:
    sys.stderr.write("\\x1b[?25l half a bar")
    sys.stderr.flush()
ready()
wait_for(0, 1)
"""


@pytest.mark.parametrize(
    ("end", "presses"),
    [("os.kill(os.getpid(), signal.SIGKILL) if rank else time.sleep(300)", False), ("signal.signal(signal.SIGINT, signal.SIG_IGN); (folder / 'deaf').touch(); time.sleep(300)", True)],
    ids=["another rank dies", "killed by a second Ctrl-C"],
)  # fmt: skip
def test_a_terminal_has_its_cursor_back(tmp_path, end, presses):
    """Whatever kills the process that drew: the supervisor outlives it."""
    worker(tmp_path, DRAWS + textwrap.dedent(end))
    master, slave = pty.openpty()
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=slave,
        text=True,
    )
    os.close(slave)
    while presses and not (tmp_path / "deaf").exists():
        time.sleep(0.01)
    while presses and process.poll() is None:  # two, unless the first is read so late that the second is the same
        process.send_signal(signal.SIGINT)
        time.sleep(0.6)
    process.communicate(timeout=100)
    shown = b""
    with contextlib.suppress(OSError):  # EIO: nobody holds the other end any more
        while part := os.read(master, 4096):
            shown += part
    os.close(master)
    assert b"\x1b[?25l half a bar" in shown
    assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l")
