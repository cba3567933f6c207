"""The signals that ask a run to end, and how a rank receives them; needs no torch."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self, final

from toolkit.launch.identity import detect_launcher

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

# By these a scheduler announces the end of a job (SLURM's --signal, submitit), long before it ends anything.
ANNOUNCING = frozenset({signal.SIGUSR1, signal.SIGUSR2})
# By this a rank of `toolkit train` is told to save and go on. To a script, whose ranks cannot, it announces the end like the other.
SAVING = signal.SIGUSR1
# Ctrl-C; the end of a job under SLURM, Kubernetes and torchrun; a terminal that closes.
ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *sorted(ANNOUNCING))
# `uv run`, `srun` and the like pass on a Ctrl-C that the terminal has already sent: one key press, two signals.
SAME_PRESS_SECONDS = 0.3
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@final
class Interrupt:
    """Context manager: each of the signals but `SAVING` raises KeyboardInterrupt, for a process that has nothing to save.

    It records that a signal came: Python drops what is raised while an object is finalised. Existing handlers stay, and so do
    signals that the parent process has set to be ignored.
    """

    def __init__(self) -> None:
        self.came = False
        self._before: dict[signal.Signals, Any] = {}
        self._hook = sys.unraisablehook

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if number == SAVING:  # nothing can be saved yet
            return
        self.came = True
        raise KeyboardInterrupt

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self) for number in ASKING if _is_free(number)}
            self._hook, sys.unraisablehook = sys.unraisablehook, self._unraisable
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {SAVING})  # which the supervisor blocks until here
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.unraisablehook = self._hook
        for number, handler in self._before.items():
            if signal.getsignal(number) is self:
                signal.signal(number, handler)

    def _unraisable(self, unraisable: UnraisableHookArgs) -> None:
        """Suppress the report of a KeyboardInterrupt that was dropped."""
        if not (self.came and unraisable.exc_type is KeyboardInterrupt):
            self._hook(unraisable)


@contextmanager
def asking(ask: Callable[[], None], save: Callable[[], None]) -> Iterator[None]:
    """Make each signal call `ask`, and `SAVING` call `save`; a second Ctrl-C raises KeyboardInterrupt.

    Python delivers signals to the main thread alone: in other threads this does nothing. The user's own handlers stay.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed: list[float] = []

    def hear(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if pressed and time.monotonic() - pressed[0] > SAME_PRESS_SECONDS:
                raise KeyboardInterrupt
            pressed.append(time.monotonic())
        (save if number == SAVING else ask)()

    before = {number: signal.signal(number, hear) for number in ASKING if _is_free(number)}
    hear_of_the_launchers_end()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore_from_here() -> None:
    """Ignore the signals in a process that has saved and only prints how to go on."""
    for number in ASKING:
        if _is_free(number):
            signal.signal(number, signal.SIG_IGN)


def hear_of_the_launchers_end() -> None:
    """Make the kernel send SIGTERM to this rank when the launcher that started it dies.

    `accelerate launch` of one process and DeepSpeed's launcher end at a signal that they do not handle, without forwarding it. Our own may be
    killed while its watchdog is stopped, or with it.

    Source:
        man 2 PR_SET_PDEATHSIG; torch distributed/elastic/multiprocessing/api.py PContext.start; deepspeed launcher/launch.py
        main; accelerate commands/launch.py simple_launcher.
    """
    if sys.platform == "linux" and detect_launcher(os.environ) in ("torchrun", "deepspeed", "accelerate", "toolkit"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


def _is_free(number: signal.Signals) -> bool:
    handler = signal.getsignal(number)
    return handler in (signal.SIG_DFL, signal.default_int_handler) or isinstance(handler, Interrupt)
