"""Where the Python code of this process is, and whether a process of this machine runs at all."""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType

import psutil

from toolkit.launch.stopped import STOPPED

_OWN = str(Path(__file__).parents[2])
_STATES = {
    **STOPPED,
    psutil.STATUS_DISK_SLEEP: "waits for a disk or a network file system, which does not answer",
    psutil.STATUS_ZOMBIE: "has ended",
    psutil.STATUS_DEAD: "has ended",
}


def main_thread_place() -> str:
    """Return file, line and function at which the main thread is, and of the thread that fetches batches if it waits for that.

    Frames of libraries are passed over: the innermost of other code counts.
    """
    frames = sys._current_frames()
    main = frames.get(threading.main_thread().ident or 0)
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    fetching = [frame for number, frame in frames.items() if (names.get(number) or "").startswith("toolkit-prefetch")]
    place = _place(main)
    if fetching and place.endswith("in prefetch"):
        return f"{place}, which waits for {_place(fetching[0])}"
    return place


def _place(frame: FrameType | None) -> str:
    found = list(_outwards(frame))
    own = next((one for one in found if not is_library(one.f_code.co_filename)), found[0] if found else None)
    if own is None:
        return ""
    return f"{own.f_code.co_filename}:{own.f_lineno} in {own.f_code.co_name}"


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_library(file: str) -> bool:
    """Return whether a file of Python code is of Python or an installed package other than this one."""
    return not file.startswith(_OWN) and file.startswith(_library_folders())


@cache
def _library_folders() -> tuple[str, ...]:
    return (*(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")), "<")


def process_state(pid: int, started: float) -> str:
    """Return in words why a process of this machine cannot answer; empty if it runs.

    Args:
        pid: Its number.
        started: Time at which it started, seconds since the epoch: the number may have been given to another since.
    """
    try:
        process = psutil.Process(pid)
        status = process.status()
        same = process.create_time() == started
    except psutil.NoSuchProcess:
        return "has ended"
    except psutil.Error:  # as of another user
        return ""
    return _STATES.get(status, "") if same else "has ended"
