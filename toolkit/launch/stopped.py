"""The watch of a launcher over ranks whose processes are stopped, which ends a run that the ranks themselves cannot end.

The watch of the ranks (`toolkit.distributed.hangs`) begins once all have joined, and needs one of them to run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import final

import psutil

from toolkit.errors import RunError

STOPPED: Mapping[str, str] = {
    psutil.STATUS_STOPPED: "is stopped (SIGSTOP or SIGTSTP; SIGCONT continues it)",
    psutil.STATUS_TRACING_STOP: "is stopped by a debugger",
}
# Of `train.hang_timeout_minutes`: ranks that have joined and still run tell more, and end the run before.
_SHARE = 1.25
_LOOKS, _LONGEST_BETWEEN_SECONDS = 10, 1.0


@final
class StoppedRanks:
    """A watch over the states of the workers of this machine.

    Args:
        minutes: The run's `hang_timeout_minutes`; 0 watches nothing.
        name_of: Function that names a rank in messages.
    """

    def __init__(self, minutes: float, name_of: Callable[[int], str]) -> None:
        self._minutes, self._name_of = minutes, name_of
        self._limit_seconds = _SHARE * 60 * minutes
        self._between_seconds = min(_LONGEST_BETWEEN_SECONDS, self._limit_seconds / _LOOKS)
        self._looked_at = time.monotonic()
        self._seconds: dict[int, float] = {}

    def look(self, processes: Mapping[int, int]) -> tuple[int, RunError] | None:
        """Look at the states, if it is time to, and return the rank that was stopped for too long with the error that ends the run.

        While this process is stopped itself, as by Ctrl-Z or a scheduler that suspends the job, no time passes.

        Args:
            processes: The process id of each rank that has not been reaped.
        """
        now = time.monotonic()
        passed = now - self._looked_at
        if not self._minutes or passed < self._between_seconds:
            return None
        self._looked_at = now
        states = {rank: STOPPED[state] for rank, pid in processes.items() if (state := _state(pid)) in STOPPED}
        # Time that has passed since the last look may be the launcher's own: it counts as one interval at most.
        passed = min(passed, 2 * self._between_seconds)
        self._seconds = {rank: self._seconds[rank] + passed if rank in self._seconds else 0.0 for rank in states}
        if max(self._seconds.values(), default=0.0) < self._limit_seconds:
            return None
        first = max(self._seconds, key=lambda rank: (self._seconds[rank], -rank))
        return first, self._error(processes, states)

    def _error(self, processes: Mapping[int, int], states: Mapping[int, str]) -> RunError:
        told = [
            f"process {processes[rank]} of {self._name_of(rank)} {state}, for {self._seconds[rank]:.0f} s"
            for rank, state in states.items()
        ]
        run = len(processes) - len(states)
        others = f"; {run} other{'s' if run > 1 else ''} of this machine run{'' if run > 1 else 's'}" if run else ""
        return RunError.of(
            code="RUN_HANG",
            key="train.hang_timeout_minutes",
            message=f"hang_timeout_minutes={self._minutes:g}, and a rank has been stopped for longer: {'; '.join(told)}{others}",
            fix="Look for what stops processes there: a signal, a debugger, a scheduler. Resume from the last checkpoint, if one was "
            "saved; train.hang_timeout_minutes=0 ends no run, as for a debugger",
        )


def _state(pid: int) -> str:
    try:
        return psutil.Process(pid).status()
    except psutil.Error:
        return ""
