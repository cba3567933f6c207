"""The outcome of a run: which rank failed first, why, and what to tell the user.

A worker leaves `error-rank-N.json` when it raises. A rank that dies without one is judged by its exit status.
"""

from __future__ import annotations

import json
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import INTERRUPTED_EXIT_CODE, Problem, RunError, ToolkitError
from toolkit.io import write_json

_LAST_LINES = 20
_TAIL_BYTES = 16 * 1024
# Peers of a rank that is killed may report "connection reset" before the supervisor sees its end.
_SILENT_DEATH_ALLOWANCE_SECONDS = 0.5
# An interpreter that receives SIGINT during start-up exits with 1, not by the signal. Scripts that catch the interrupt
# often do too. What `toolkit train` raises is written to the error file, whatever its exit code.
_PYTHON_INTERRUPTED_AT_START = 1
_SIGNAL_FIXES = {
    signal.SIGKILL: "Most often this is the kernel's out-of-memory killer: check `dmesg`, and compare the host's RAM with what parallel.offload needs (`toolkit validate JOB --explain`)",
    signal.SIGBUS: "Most often /dev/shm is full: check `df -h /dev/shm`, and give a container more with --shm-size",
    signal.SIGSEGV: "A native library crashed: its Python stack is in the rank's output",
    signal.SIGABRT: "A native library aborted (as after a communication timeout): the reason is in the rank's output",
    signal.SIGTERM: "Something outside this run ended the rank: check the scheduler's and the machine's logs",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerError:
    """The exception that ended a worker, as written to its error file.

    Args:
        time: Seconds since the epoch.
        kind: Name of the exception's class.
        message: Its text.
        traceback: Traceback as Python prints it.
        problems: Problems of a ToolkitError; empty for any other exception.
        exit_code: Exit code of the worker process.
    """

    rank: int
    time: float
    kind: str
    message: str
    traceback: str
    problems: tuple[Problem, ...]
    exit_code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedWorker:
    """A worker that has ended: exit status as of subprocess (-9 for SIGKILL), and when (seconds since the epoch)."""

    rank: int
    status: int
    ended_at: float
    log_file: Path | None
    was_stopped: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFailure:
    """The rank that failed first.

    Args:
        rank: Global rank.
        ended_by: `exit code 7` or `SIGKILL`.
        log_file: Path of its output; `None` for the rank that wrote to the terminal.
        last_lines: Last lines of that file.
        error: Error that the worker wrote itself, if any.
        problems: Problems to show the user: those of a ToolkitError, else one that names rank and cause.
    """

    rank: int
    ended_by: str
    log_file: Path | None
    last_lines: tuple[str, ...]
    error: WorkerError | None
    problems: tuple[Problem, ...]

    @property
    def is_users_to_mend(self) -> bool:
        """True if the worker raised a ToolkitError, so that its problems suffice and no traceback is needed."""
        return self.error is not None and bool(self.error.problems)

    def describe(self) -> str:
        """Return the text for the terminal: problems alone, or preceded by the traceback or the last lines of output."""
        parts = []
        if not self.is_users_to_mend:
            if self.error is not None:
                parts.append(self.error.traceback.rstrip())
            elif self.last_lines:
                parts.append(f"Last lines of {self.log_file}:\n" + "\n".join(f"  {line}" for line in self.last_lines))
        return "\n".join([*parts, *map(str, self.problems)])


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """The outcome of a run.

    Args:
        exit_code: 0 success, 75 out of time, 130 interrupted, 3 failed, or that of the ToolkitError that ended the first rank.
        interrupted: Whether the user or the scheduler asked the run to end.
        failure: The first rank that failed, if any did.
    """

    exit_code: int
    interrupted: bool
    failure: WorkerFailure | None


def error_file(log_dir: Path, rank: int) -> Path:
    """Return the path at which rank `rank` writes its error."""
    return log_dir / f"error-rank-{rank}.json"


def log_file(log_dir: Path, rank: int) -> Path:
    """Return the path of the output of rank `rank`, unless it writes to the terminal."""
    return log_dir / f"rank-{rank}.log"


def write_worker_error(log_dir: Path, rank: int, error: BaseException) -> int:
    """Write the exception that ends this worker to its error file, for the supervisor.

    Never raises: the original exception matters more than a full disk.

    Returns:
        The exit code to end the worker with.
    """
    problems = error.problems if isinstance(error, ToolkitError) else ()
    exit_code = RunError.exit_code
    if isinstance(error, ToolkitError):
        exit_code = error.exit_code
    elif isinstance(error, KeyboardInterrupt):
        exit_code = INTERRUPTED_EXIT_CODE
    record = {
        "rank": rank,
        "time": time.time(),
        "kind": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
        "problems": [problem.as_dict() for problem in problems],
        "exit_code": exit_code,
    }
    target = error_file(log_dir, rank)
    try:
        write_json(target, record, ensure_ascii=True)
    except OSError as failure:
        print(f"could not write {target}: {failure}", file=sys.stderr)
    return exit_code


def read_worker_error(log_dir: Path, rank: int) -> WorkerError | None:
    """Read what `write_worker_error` wrote, or return `None`."""
    try:
        record = json.loads(error_file(log_dir, rank).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return WorkerError(**{**record, "problems": tuple(Problem(**problem) for problem in record["problems"])})


def rank_name(rank: int) -> str:
    """Return the name of a rank whose place in the grid is unknown."""
    return f"rank {rank}"


def conclude(
    ended: Sequence[EndedWorker],
    *,
    log_dir: Path,
    interrupted: bool,
    name_of: Callable[[int], str] = rank_name,
    well: Collection[int] = (),
) -> RunOutcome:
    """Find the first rank that failed and the run's exit code.

    A rank that was stopped because another failed counts only if it had already written an error of its own.

    Args:
        ended: All workers of the run.
        log_dir: Folder of logs and error files.
        interrupted: Whether the run was asked to end.
        name_of: Function that names a rank, with its place as `Grid.describe_rank` prints it.
        well: Exit codes, besides 0, by which the workers end well; that of the run is then the same.
    """
    errors = {worker.rank: read_worker_error(log_dir, worker.rank) for worker in ended}
    rest = [worker for worker in ended if worker.status not in well or errors[worker.rank] is not None]
    failed = [worker for worker in rest if _has_failed(worker, errors[worker.rank], interrupted=interrupted)]
    if not failed:
        agreed = next((worker.status for worker in ended if worker.status in well), 0)
        exit_code = INTERRUPTED_EXIT_CODE if interrupted else agreed
        return RunOutcome(exit_code=exit_code, interrupted=interrupted, failure=None)
    first = min(failed, key=lambda worker: (_failed_at(worker, errors[worker.rank]), worker.rank))
    failure = _failure(first, errors[first.rank], name_of(first.rank))
    exit_code = (
        failure.error.exit_code if failure.error is not None and failure.is_users_to_mend else RunError.exit_code
    )
    return RunOutcome(exit_code=exit_code, interrupted=interrupted, failure=failure)


def ended_by_interrupt(status: int) -> bool:
    """Return whether a worker with this status ended because it was asked to, saved or not."""
    return status in (0, INTERRUPTED_EXIT_CODE, -signal.SIGINT, -signal.SIGTERM)


def _has_failed(worker: EndedWorker, error: WorkerError | None, *, interrupted: bool) -> bool:
    if worker.status == 0:
        return False
    if error is not None and error.kind != KeyboardInterrupt.__name__:
        return True
    obeyed = ended_by_interrupt(worker.status) or (error is None and worker.status == _PYTHON_INTERRUPTED_AT_START)
    return not worker.was_stopped and not (interrupted and obeyed)


def _failed_at(worker: EndedWorker, error: WorkerError | None) -> float:
    if error is not None:
        return error.time
    # Native code aborts on a peer's failure, so SIGABRT has no allowance.
    return worker.ended_at - (0 if worker.status == -signal.SIGABRT else _SILENT_DEATH_ALLOWANCE_SECONDS)


def _failure(worker: EndedWorker, error: WorkerError | None, name: str) -> WorkerFailure:
    ended_by = f"exit code {worker.status}" if worker.status > 0 else signal.Signals(-worker.status).name
    return WorkerFailure(
        rank=worker.rank,
        ended_by=ended_by,
        log_file=worker.log_file,
        last_lines=_last_lines(worker.log_file),
        error=error,
        problems=error.problems if error is not None and error.problems else (_problem(worker, error, ended_by, name),),
    )


def _problem(worker: EndedWorker, error: WorkerError | None, ended_by: str, name: str) -> Problem:
    output = f"Its output is in {worker.log_file}" if worker.log_file else "Its output is above"
    if error is not None:
        first_line = (error.message.splitlines() or [""])[0]
        text = f"{name} failed first, with {error.kind}: {first_line}"
        return Problem(code="RANK_FAILED", message=text.rstrip(": ."), fix=output)
    if worker.status > 0:
        return Problem(code="RANK_FAILED", message=f"{name} failed first, with {ended_by}", fix=output)
    hint = _SIGNAL_FIXES.get(signal.Signals(-worker.status), "Something outside this run sent the signal")
    return Problem(code="RANK_KILLED", message=f"{name} failed first, killed by {ended_by}", fix=f"{hint}. {output}")


def _last_lines(path: Path | None) -> tuple[str, ...]:
    if path is None:
        return ()
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        text = file.read().decode("utf-8", errors="replace")
    # A progress bar redraws its line with carriage returns: only the last state matters.
    return tuple(line.rsplit("\r", 1)[-1] for line in text.rstrip().split("\n")[-_LAST_LINES:] if text.strip())
