"""Supervision of the workers of one node: all of them are ended when one fails or the user asks.

Signals to a worker: one SIGINT asks it to end, which toolkit's trainer does after its step and a save, and a script
as it likes; SIGTERM means that the run is lost and that SIGKILL follows; toolkit's trainer then ends at once. Each worker
has a session of its own, so the terminal's Ctrl-C reaches the supervisor alone, and each worker can be ended together with
the processes that it started.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import final

from toolkit.errors import INTERRUPTED_EXIT_CODE, RunError
from toolkit.io import make_folder
from toolkit.launch.outcome import (
    EndedWorker,
    RunOutcome,
    conclude,
    ended_by_interrupt,
    error_file,
    log_file,
    rank_name,
    write_worker_error,
)
from toolkit.launch.signals import ANNOUNCING, ASKING, SAME_PRESS_SECONDS, SAVING
from toolkit.launch.stopped import StoppedRanks
from toolkit.launch.terminal import restore_terminal
from toolkit.launch.watchdog import Watchdog

_POLL_SECONDS = 0.02
GRACE_SECONDS = 10.0
_CLEAR_LINE = "\r\x1b[2K"
# For an unknown script: Python's own handler raises KeyboardInterrupt at any point of it.
WHEN_ASKED = "each rank was sent SIGINT and ends as its script does"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerRanks:
    """What ranks of `toolkit train` do that those of a script do not: SIGUSR1 is passed on to one, and all save and go on.

    Args:
        exit_codes: Codes, besides 0, by which all of them end well.
        asked_seconds: Seconds that they have to end once they are asked; None for as many as they need.
        hang_timeout_minutes: Time, and a quarter of it, for which a rank may be stopped before all are ended; 0 for any time.
    """

    exit_codes: frozenset[int] = frozenset()
    asked_seconds: float | None = None
    hang_timeout_minutes: float = 0.0


def supervise(
    argv: Sequence[str],
    *,
    ranks: Sequence[int],
    env_for_rank: Callable[[int], Mapping[str, str]],
    log_dir: Path,
    grace_seconds: float = GRACE_SECONDS,
    when_asked: str = WHEN_ASKED,
    name_of: Callable[[int], str] = rank_name,
    trainer: TrainerRanks | None = None,
) -> RunOutcome:
    """Run one process per rank until all have ended.

    The first of `ranks` has the terminal; the others write `log_dir/rank-N.log`. When a rank fails, the others get
    SIGTERM, and SIGKILL after `grace_seconds`, with all processes of their groups. The first SIGINT, SIGTERM, SIGHUP,
    SIGUSR1 or SIGUSR2 is passed on to each worker as SIGINT; a second one of the first three kills them. The first of
    `TrainerRanks` gets SIGUSR1 as it is, each time. Signals are caught only where this runs in the main thread.

    Args:
        argv: Command line of a worker, the same for each.
        ranks: Global ranks on this node.
        env_for_rank: Complete environment of a rank (`worker_environment`).
        log_dir: Folder of logs and error files; made if absent, files of these ranks replaced.
        grace_seconds: Time between SIGTERM and SIGKILL, seconds.
        when_asked: What the workers do at SIGINT, for the line that is printed at Ctrl-C.
        name_of: Function that names a rank, for the message that names the first to fail.
        trainer: What the workers do if they are those of `toolkit train`.

    Raises:
        RunError: WORKER_START, if the command cannot be started; LOG_DIR, if the folder cannot be written.
    """
    _clear(log_dir, ranks)
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(caught_signals())
        watchdog = stack.enter_context(Watchdog())
        run = _Run(watchdog=watchdog, grace_seconds=grace_seconds, when_asked=when_asked, trainer=trainer)
        stack.callback(run.kill_all)  # no worker may outlive this call
        for rank in ranks:
            run.start(
                argv, rank=rank, env=env_for_rank(rank), log=None if rank == ranks[0] else log_file(log_dir, rank)
            )
        minutes = 0.0 if trainer is None else trainer.hang_timeout_minutes
        run.wait(signals, StoppedRanks(minutes, name_of), log_dir)
        well = frozenset() if trainer is None else trainer.exit_codes
        return conclude(run.ended, log_dir=log_dir, interrupted=run.interrupted, name_of=name_of, well=well)


def _clear(log_dir: Path, ranks: Sequence[int]) -> None:
    try:
        make_folder(log_dir)
        for rank in ranks:
            error_file(log_dir, rank).unlink(missing_ok=True)
            log_file(log_dir, rank).unlink(missing_ok=True)
    except OSError as error:
        raise RunError.of(
            code="LOG_DIR",
            key="train.output_dir",
            message=f"the log folder {log_dir} cannot be written: {error.strerror}",
            fix="Set `train.output_dir` to a folder that you may write",
        ) from error


def _tell(line: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may have gone
        # The line may show the first rank's progress bar, which is redrawn on the next line.
        print(f"{_CLEAR_LINE if sys.stderr.isatty() else ''}{line}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def caught_signals() -> Iterator[int]:
    """Turn signals into bytes on a pipe and yield its read end, so that no handler interrupts running code."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def note(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(writer, bytes([number]))

    previous = {}
    if threading.current_thread() is threading.main_thread():
        for number in ASKING:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup: the run is meant to outlive its terminal
            previous[number] = signal.signal(number, note)
    try:
        yield reader
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        os.close(reader)
        os.close(writer)


@contextlib.contextmanager
def _saving_blocked() -> Iterator[None]:
    """Have a process that is started here wait with `SAVING` until it can hear it: by default it would die of it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {SAVING})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Worker:
    rank: int
    process: subprocess.Popen[bytes]
    log: Path | None

    def signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def has_ended(self) -> bool:
        """Return whether it has ended, without reaping it: its process group id stays taken until `reap`."""
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


@final
class _Run:
    """The workers of one call of `supervise`."""

    def __init__(
        self, *, watchdog: Watchdog, grace_seconds: float, when_asked: str, trainer: TrainerRanks | None
    ) -> None:
        self.ended: list[EndedWorker] = []
        self.interrupted = False
        self._insisted = False
        self._watchdog = watchdog
        self._grace_seconds = grace_seconds
        self._when_asked = when_asked
        self._trainer = trainer
        self._running: list[_Worker] = []
        self._last_signal: tuple[int, float] = (0, -1.0)
        self._stopping = False
        self._kill_at: float | None = None

    def start(self, argv: Sequence[str], *, rank: int, env: Mapping[str, str], log: Path | None) -> None:
        """Start one worker in a session of its own."""
        with contextlib.ExitStack() as stack:
            output = None if log is None else stack.enter_context(log.open("wb"))
            if self._trainer is not None:
                stack.enter_context(_saving_blocked())
            try:
                process = subprocess.Popen(
                    argv,
                    env=env,
                    stdin=None if log is None else subprocess.DEVNULL,
                    stdout=output,
                    stderr=None if log is None else subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise RunError.of(
                    code="WORKER_START",
                    message=f"the worker {argv[0]} of rank {rank} cannot be started: {error.strerror}",
                    fix="Check that the file exists and is executable, and that the limits of processes and memory "
                    "are not reached",
                ) from error
        self._running.append(_Worker(rank=rank, process=process, log=log))
        self._watchdog.watch(process.pid)

    def wait(self, signals: int, stopped_ranks: StoppedRanks, log_dir: Path) -> None:
        """Wait until every worker has ended, and end all once one of them has been stopped for too long."""
        while self._running:
            readable, _, _ = select.select([signals], [], [], _POLL_SECONDS)
            for number in os.read(signals, 64) if readable else b"":
                self._obey(signal.Signals(number))
            # Read before the first failure among them stops the others.
            was_stopped = self._stopping
            for worker in [worker for worker in self._running if worker.has_ended()]:
                self._reap(worker, was_stopped=was_stopped)
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self.kill_all()
            if self._stopping:
                continue
            hang = stopped_ranks.look({worker.rank: worker.process.pid for worker in self._running})
            if hang is not None:
                write_worker_error(log_dir, *hang)
                self._stop()

    def kill_all(self) -> None:
        """Kill and reap every worker that still runs."""
        self._stopping = True
        for worker in self._running:
            worker.signal_group(signal.SIGKILL)
        for worker in tuple(self._running):
            self._reap(worker, was_stopped=True)

    def _reap(self, worker: _Worker, *, was_stopped: bool) -> None:
        if worker.has_ended():
            worker.signal_group(signal.SIGKILL)  # nothing else would end its remaining child processes
        status = worker.process.wait()
        self._watchdog.release(worker.process.pid)
        self._running.remove(worker)
        if status < 0 and worker.log is None:
            restore_terminal()
        self.ended.append(
            EndedWorker(
                rank=worker.rank, status=status, ended_at=time.time(), log_file=worker.log, was_stopped=was_stopped
            )
        )
        if self._trainer is not None and status == INTERRUPTED_EXIT_CODE and not (self.interrupted or self._stopping):
            # It was asked to end by itself, or with a rank of another node, whose launcher alone heard the signal.
            self._ask_all()
        well = self._trainer is not None and status in self._trainer.exit_codes
        orderly = status == 0 or well or (self.interrupted and status > 0 and ended_by_interrupt(status))
        if not orderly and not self._stopping:
            self._stop()

    def _stop(self) -> None:
        self._stopping = True
        self._kill_at = time.monotonic() + self._grace_seconds
        for worker in self._running:
            worker.signal_group(signal.SIGTERM)

    def _obey(self, number: signal.Signals) -> None:
        last, at = self._last_signal
        self._last_signal = (number, time.monotonic())
        if number == last and time.monotonic() - at < SAME_PRESS_SECONDS:
            return
        if number == SAVING and self._trainer is not None:
            if not self.interrupted and not self._stopping:
                _tell(f"{number.name}: each rank finishes its step, saves and goes on")
                # One, and all ranks agree: another might hear it after the step at which they have, and save twice.
                for worker in self._running[:1]:
                    os.kill(worker.process.pid, SAVING)
            return
        if self._insisted or self._stopping:
            if number not in ANNOUNCING:
                self.kill_all()
                _tell(f"{number.name}: the workers were killed")
            return
        # The end that SIGUSR1 has announced comes as SIGTERM, and the workers may still save.
        self._insisted = number not in ANNOUNCING
        if self.interrupted:
            return
        _tell(
            f"{number.name}: {self._when_asked}; {'SIGINT twice' if number in ANNOUNCING else 'once more'} to kill them"
        )
        self._ask_all()

    def _ask_all(self) -> None:
        """Ask every worker that still runs to end."""
        self.interrupted = True
        if self._trainer is not None and self._trainer.asked_seconds is not None:
            self._kill_at = time.monotonic() + self._trainer.asked_seconds
        for worker in self._running:
            # The worker alone: its data loader processes must live for the step to end. Not Popen.send_signal, which
            # would reap it; a process that has not been reaped can always be signalled.
            os.kill(worker.process.pid, signal.SIGINT)
