"""One run per output folder: its process keeps a lock file there while it is alive, and records its identity in it.

The kernel releases the lock (flock) when its owner ends for any reason; NFS forwards it to the server. Where a file
system has no locks, or keeps them local to a machine, the file's record decides: whether that process is alive or, on another
machine, whether it has touched the file recently.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from toolkit.errors import PlanError, Problem, RunError, raise_all
from toolkit.io import made_folder, nearest_folder
from toolkit.launch.lock_holder import Holder

LOCK = ".run.lock"
BEAT_SECONDS = 10.0
# A run of another machine that has not touched its file for so long is taken for dead: NFS clients may cache the
# attributes of a file for a minute (acregmax, man 5 nfs).
SILENCE_SECONDS = 90.0
_WITHOUT_FLOCK = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})

_own_handles: set[int] = set()


@contextlib.contextmanager
def hold_output(folder: Path) -> Iterator[None]:
    """Lock an output folder for one run; do nothing if this process or an ancestor already owns the lock.

    Args:
        folder: Output folder; created if absent, and removed again if nothing was written into it.

    Raises:
        PlanError: OUTPUT_WRITE.
        RunError: OUTPUT_IN_USE, with the process that owns it.
    """
    path = folder / LOCK
    holder = Holder.read(path)
    if holder is not None and holder.is_of_this_run:
        yield
        return
    raise_all(PlanError, write_problems(folder))
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(made_folder(folder))
            handles = stack.enter_context(_locked(path))
        except OSError as error:  # such as a lock that another user left
            raise PlanError(_unwritable(folder, path, error)) from None
        stack.enter_context(_beating(path, handles))
        yield


def use_problems(folder: Path) -> Iterator[Problem]:
    """Yield an OUTPUT_IN_USE problem if a run has locked an output folder, as far as is known without waiting."""
    path = folder / LOCK
    holder = Holder.read(path)
    if holder is None or holder.is_of_this_run:
        return
    try:
        with path.open("rb") as file:
            is_held = _flock(file.fileno(), fcntl.LOCK_SH) is False
        is_in_use = is_held or holder.lives or (not holder.is_of_this_machine and _silence(path) < SILENCE_SECONDS)
    except OSError:
        return  # its owner has ended and removed it, or nothing can be written there, as `write_problems` says
    if is_in_use:
        yield _in_use(folder, holder)


def write_problems(folder: Path) -> Iterator[Problem]:
    """Yield an OUTPUT_WRITE problem if an output folder cannot be created or written."""
    where = folder
    try:
        where = nearest_folder(folder)
        # Tried, not inferred from the permissions: a disk may be read-only, over quota or gone.
        with tempfile.TemporaryDirectory(prefix=".toolkit-", dir=where):
            pass
    except OSError as error:
        yield _unwritable(folder, where, error)


def _unwritable(folder: Path, where: Path, error: OSError) -> Problem:
    return Problem(
        code="OUTPUT_WRITE",
        key="train.output_dir",
        message=f"output_dir={folder}: {where} cannot be written: {error.strerror}",
        fix="Set train.output_dir to a folder that you may write",
    )


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[list[int]]:
    """Yield the handles of this process's lock files, the last of which is at `path`; the file is removed with the lock."""
    handles = [_take_in_no_fork(path)]
    try:
        yield handles
    finally:
        for handle in handles:
            _own_handles.discard(handle)
            with contextlib.suppress(OSError):  # a disk error may have ended the run
                if _is_at(handle, path):  # else the folder was deleted, and the file there now is another run's
                    path.unlink()
            os.close(handle)


def _take_in_no_fork(path: Path) -> int:
    handle = _take(path)
    _own_handles.add(handle)
    _close_in_children()
    return handle


@functools.cache
def _close_in_children() -> None:
    """Keep processes forked from this one from keeping its locks after it has died."""

    def close() -> None:
        while _own_handles:
            os.close(_own_handles.pop())

    os.register_at_fork(after_in_child=close)


def _take(path: Path) -> int:
    """Open and lock the file, and write this process's identity into it.

    Raises:
        RunError: OUTPUT_IN_USE.
    """
    import psutil

    while True:
        handle, locked = os.open(path, os.O_RDWR | os.O_CREAT, 0o666), None
        try:
            locked = _flock(handle, fcntl.LOCK_EX)
            holder = Holder.read(path)
            if locked is False or (holder is not None and _lives_all_the_same(path, holder, has_flock=bool(locked))):
                raise RunError(_in_use(path.parent, holder))
            if _is_at(handle, path):  # else its owner has removed it since it was opened here
                os.ftruncate(handle, 0)
                os.pwrite(handle, Holder.of(psutil.Process()).as_text().encode(), 0)
                os.fsync(handle)
                return handle
        except BaseException:
            if locked and not os.fstat(handle).st_size and _is_at(handle, path):  # it names no owner
                path.unlink(missing_ok=True)
            os.close(handle)
            raise
        os.close(handle)


def _flock(handle: int, kind: int) -> bool | None:
    """Try to lock a file: return whether it succeeded, or None if the file system has no such locks."""
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _WITHOUT_FLOCK:
            return None
        return False
    return True


def _lives_all_the_same(path: Path, holder: Holder, *, has_flock: bool) -> bool:
    """Return whether the process that a lock file names is alive, although the kernel would grant the lock."""
    if holder.is_of_this_machine:
        return not has_flock and holder.lives
    last = _touched(path)
    if (silence := _silence(path)) < SILENCE_SECONDS:
        print(
            f"output_dir={path.parent} was in use by {holder}; it is taken over if that does not respond for another "
            f"{SILENCE_SECONDS - silence:.0f} s ...",
            file=sys.stderr,
            flush=True,
        )
    while _silence(path) < SILENCE_SECONDS:
        time.sleep(1.0)
        if _touched(path) not in (last, 0.0):
            return True
    return False


def _silence(path: Path) -> float:
    """Return the seconds since a file was touched, by the clock of its file system, as machines' clocks differ."""
    with tempfile.TemporaryFile(dir=path.parent) as now:
        return os.fstat(now.fileno()).st_mtime - _touched(path)


def _touched(path: Path) -> float:
    try:
        with path.open("rb") as file:  # opened, so that NFS asks the server (man 5 nfs, close-to-open)
            return os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return 0.0  # its owner has ended and removed it


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _beating(path: Path, handles: list[int]) -> Iterator[None]:
    """Touch the file every few seconds, so that runs on other machines see it as alive.

    If the folder was deleted or moved and the run has recreated it, the lock is taken there too.
    """
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError, RunError):  # RunError: another run was faster
                os.utime(handles[-1])
                if path.parent.is_dir() and not _is_at(handles[-1], path):
                    handles.append(_take_in_no_fork(path))

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _in_use(folder: Path, holder: Holder | None) -> Problem:
    who = "another process" if holder is None else str(holder)
    end = "end it" if holder is None else f"end it (`kill {holder.pid}` there makes it save)"
    return Problem(
        code="OUTPUT_IN_USE",
        key="train.output_dir",
        message=f"output_dir={folder} is in use by another run, {who}: both would write checkpoints of the same names",
        fix=f"Wait for its end or {end}, or set train.output_dir to another folder",
    )
