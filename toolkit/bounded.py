"""Calls of what a stranger wrote, such as a template or a regular expression, in a process of limited time and memory."""

from __future__ import annotations

import resource
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

import psutil

from toolkit.forks import Fork, ForkEndedError
from toolkit.units import GIB

T = TypeVar("T")

# What published templates and patterns need is a thousandth of these.
SECONDS = 10
MEMORY_BYTES = 4 * GIB

# A busy machine gives a process a part of a core; one that gets less than this part is not waited for.
_SMALLEST_SHARE = 0.05


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
    try:
        return Fork(work, before=partial(_limit, limit)).result(seconds=limit / _SMALLEST_SHARE)
    except (ForkEndedError, MemoryError) as error:
        raise OutOfBoundsError from error


def _limit(seconds: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    with suppress(ValueError, OSError):  # the parent's own limit may be lower
        room = psutil.Process().memory_info().vms + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (room, room))
