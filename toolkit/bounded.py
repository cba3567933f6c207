"""Calls of what a stranger wrote, such as a template or a regular expression, in a process of limited time and memory."""

from __future__ import annotations

import os
import pickle
import resource
import select
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

import psutil

from toolkit.units import GIB

T = TypeVar("T")

# What published templates and patterns need is a thousandth of these.
SECONDS = 10
MEMORY_BYTES = 4 * GIB

# A busy machine gives a process a part of a core; one that gets less than this part is not waited for.
_SMALLEST_SHARE = 0.05
_READ_BYTES = 2**16


class OutOfBoundsError(Exception):
    """Raised if a call takes more time or memory than it may."""


def call_bounded(work: Callable[[], T], *, seconds: int | None = None) -> T:
    """Call a function in a forked process, and return its value or raise its exception.

    Limits inside one process do not hold: a regular expression, a power or the repetition of a string is one instruction.

    Args:
        work: Function whose value or exception can be pickled; what it changes is lost.
        seconds: Processor time that it may take; `SECONDS` when left out.

    Raises:
        OutOfBoundsError: If it takes more than `seconds`, or than `MEMORY_BYTES`.
    """
    limit = SECONDS if seconds is None else seconds
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        _answer(work, write_end, seconds=limit)
    os.close(write_end)
    try:
        content = _read_all(read_end, seconds=limit / _SMALLEST_SHARE)
    finally:
        os.close(read_end)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if not content:
        raise OutOfBoundsError
    value, error = pickle.loads(content)
    if isinstance(error, MemoryError):
        raise OutOfBoundsError from error
    if error is not None:
        raise error
    return value  # type: ignore[no-any-return]


def _answer(work: Callable[[], Any], write_end: int, *, seconds: int) -> NoReturn:
    """Call the function in this process, write what comes of it, and end, without the clean-up of the parent."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which ends this process
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        with suppress(ValueError, OSError):  # the parent's own limit may be lower
            room = psutil.Process().memory_info().vms + MEMORY_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (room, room))
        content = _called(work)
        with os.fdopen(write_end, "wb") as pipe:
            pipe.write(content)
    finally:
        os._exit(0)


def _called(work: Callable[[], Any]) -> bytes:
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
        if not select.select([read_end], [], [], left)[0]:
            break
        part = os.read(read_end, _READ_BYTES)
        if not part:
            return b"".join(parts)
        parts.append(part)
    return b""
