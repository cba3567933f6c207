"""A watchdog process that ends the workers when their supervisor is killed and can no longer do so itself.

It keeps the read end of a pipe whose write end only the supervisor has. However the supervisor
dies, the kernel closes the pipe, and the watchdog kills each registered process group, grandchildren included.
PR_SET_PDEATHSIG is no substitute: it reaches the worker alone, and needs Python code between fork and exec, which is
not safe where the calling process has threads. Ranks of training ask for it themselves beside this (`hear_of_the_launchers_end`): where
the watchdog is stopped or killed too, they save and end.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from types import TracebackType
from typing import Self, final

_LAST_SECONDS = 5.0  # to end in; it needs milliseconds
# SIGINT, SIGTERM and SIGHUP are ignored because SLURM sends them to every process of a step.
_PROGRAM = f"""
import os, signal, sys
for ignored in ({signal.SIGINT:d}, {signal.SIGTERM:d}, {signal.SIGHUP:d}):
    signal.signal(ignored, signal.SIG_IGN)
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, {signal.SIGKILL:d})
    except OSError:
        pass
"""


@final
class Watchdog:
    """A watch over process groups for as long as the `with` block lasts."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
            start_new_session=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.send_signal(signal.SIGCONT)  # whatever has stopped the workers may have stopped it too
        try:
            self._process.wait(_LAST_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def watch(self, process_group: int) -> None:
        """Kill `process_group` when the supervisor dies."""
        self._tell(f"+{process_group}\n")

    def release(self, process_group: int) -> None:
        """Forget `process_group`: its id may be reused from now on."""
        self._tell(f"-{process_group}\n")

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the watchdog was killed: the run itself can go on
            self._process.stdin.write(line)
