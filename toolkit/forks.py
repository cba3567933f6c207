"""Calls in forked processes, which share what this one has imported, and whose values come back pickled."""

from __future__ import annotations

import ctypes
import os
import pickle
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Generic, NoReturn, TypeVar

T = TypeVar("T")

_READ_BYTES = 2**16
_POLL_SECONDS = 0.005
# A killed process ends within milliseconds, or, where a call never returns, not at all.
_ABANDON_SECONDS = 0.5
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class ForkEndedError(Exception):
    """Raised if a process ended without an answer, or took too long."""


class Fork(Generic[T]):
    """A call that runs in a forked process.

    Args:
        work: Function whose value or exception can be pickled; what it changes is lost.
        before: Called in that process first, such as to limit it.
        with_children: Whether what that process starts ends with it.
    """

    def __init__(
        self, work: Callable[[], T], *, before: Callable[[], object] = lambda: None, with_children: bool = False
    ) -> None:
        self._read_end, write_end = os.pipe()
        self._with_children = with_children
        parent = os.getpid()
        # Python forgets a Ctrl-C that arrives while it prepares a fork.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._child = os.fork()
            if self._child == 0:
                os.close(self._read_end)
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which ends this process
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                if with_children:
                    os.setpgrp()
                _answer(work, write_end, before, parent)
            os.close(write_end)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def result(self, *, seconds: float = float("inf")) -> T:
        """Return the value of the call or raise its exception; to be called once.

        Args:
            seconds: How long to wait.

        Raises:
            ForkEndedError: The process was killed, or is now because it took too long.
        """
        content = b""
        try:
            content = _read_all(self._read_end, seconds=seconds)
        finally:
            self.close(seconds=float("inf") if content else _ABANDON_SECONDS)
        if not content:
            raise ForkEndedError
        value, error = pickle.loads(content)
        if error is not None:
            raise error
        return value  # type: ignore[no-any-return]

    def close(self, *, seconds: float = float("inf")) -> None:
        """End the process, whether it has answered or not; does nothing the second time. `seconds` as of `end_process`."""
        if self._child:
            os.close(self._read_end)
            if self._with_children:
                with suppress(
                    ProcessLookupError, PermissionError
                ):  # it has not made its group yet, or has ended with it
                    os.killpg(self._child, signal.SIGKILL)
            end_process(self._child, seconds=seconds)
            self._child = 0


def end_process(child: int, *, seconds: float = float("inf")) -> None:
    """End a forked process if it still runs, and leave nothing of it.

    Args:
        child: Process.
        seconds: How long to wait for its end: in the middle of a call to a dead file server it has none, and is left to the system.
    """
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    deadline = time.monotonic() + seconds
    with suppress(ChildProcessError):
        if seconds == float("inf"):
            os.waitpid(child, 0)
            return
        while os.waitpid(child, os.WNOHANG)[0] == 0 and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)


def end_with(parent: int) -> None:
    """Let this forked process end when its parent does, however that ends; on Linux only.

    Args:
        parent: Process that has forked this one.

    Source:
        prctl(2), PR_SET_PDEATHSIG.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has ended already
            os._exit(0)


def is_of_use() -> bool:
    """Return whether forks of this process make it faster: there is a second core, and no threads of torch yet, so that they are safe."""
    return sys.platform == "linux" and num_cores() > 1 and "torch" not in sys.modules


def call_spread(calls: Sequence[Callable[[], T]], *, processes: int) -> list[T]:
    """Call functions in this process and in forks of it at the same time, and return their values in order.

    Args:
        calls: Functions whose values can be pickled, and that raise nothing.
        processes: Most processes at a time, this one included.

    Raises:
        ForkEndedError: One of the processes was killed.
    """
    num_groups = max(1, min(processes, len(calls)))
    hear = partial(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT))  # Ctrl-C ends all of them alike
    forks = [Fork(partial(_call_all, calls[first::num_groups]), before=hear) for first in range(1, num_groups)]
    try:
        groups = [_call_all(calls[::num_groups]), *(fork.result() for fork in forks)]
    finally:
        for fork in forks:
            fork.close()
    return [groups[index % num_groups][index // num_groups] for index in range(len(calls))]


def _call_all(calls: Sequence[Callable[[], T]]) -> list[T]:
    return [call() for call in calls]


def _answer(work: Callable[[], Any], write_end: int, before: Callable[[], object], parent: int) -> NoReturn:
    """Call the function in this process, write what comes of it, and end, without the clean-up of the parent."""
    try:
        end_with(parent)
        before()
        content = pickled_call(work)
        with os.fdopen(write_end, "wb") as pipe:
            pipe.write(content)
    finally:
        os._exit(0)


def pickled_call(work: Callable[[], Any]) -> bytes:
    """Return the pickled value and exception of a call, one of them None."""
    try:
        return pickle.dumps((work(), None))
    except BaseException as error:
        try:
            content = pickle.dumps((None, error))
            pickle.loads(content)  # some exceptions can be pickled only
        except Exception:
            content = pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}")))
        return content


def _read_all(read_end: int, *, seconds: float) -> bytes:
    """Read until the other end closes; nothing if that takes too long."""
    parts: list[bytes] = []
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        wait = None if left == float("inf") else left
        if not select.select([read_end], [], [], wait)[0]:
            break
        part = os.read(read_end, _READ_BYTES)
        if not part:
            return b"".join(parts)
        parts.append(part)
    return b""


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
