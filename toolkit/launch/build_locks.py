"""Locks that a killed compilation of DeepSpeed's extensions left behind, for which torch before 2.14 waits forever.

torch 2.14 locks by `flock`, which the kernel releases when the process ends, on a file that stays; older versions by the file's
existence: the process that created it keeps it open, and deletes it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from toolkit.errors import Problem
from toolkit.launch.extensions import Extension, Machine
from toolkit.planning.deepspeed_config import Consumer
from toolkit.planning.plan import Plan

FIRST_FLOCK = (2, 14)

# DeepSpeed's slowest extension compiles in about two minutes, async_io seven on two cores; a lock this old has no live owner
# on any machine.
STALE_SECONDS = 900.0

# torch closes the file after a compilation, then deletes it.
_SETTLE_SECONDS = 0.2

# File systems of one machine, where every process that may have the file open is visible.
_LOCAL = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "tmpfs", "overlay"})


def delete_stale_locks(
    plan: Plan, consumer: Consumer = "toolkit", *, machine: Machine | None = None
) -> Iterator[Problem]:
    """Delete the stale locks of extensions that a run of a plan loads; yield a BUILD_LOCK problem for each that cannot be deleted.

    Args:
        plan: Resolved plan.
        consumer: Which DeepSpeed configuration it runs with.
        machine: Machine to run on; this one when left out.
    """
    for lock in stale_locks(plan, consumer, machine=machine):
        try:
            lock.unlink(missing_ok=True)
        except OSError as error:
            yield Problem(
                code="BUILD_LOCK",
                key=str(lock),
                message=f"{lock} is a stale lock of a killed compilation, for which DeepSpeed would wait forever, and "
                f"cannot be deleted: {error.strerror}",
                fix=f"Delete it: rm {lock}",
                source="torch utils/file_baton.py",
            )


def stale_locks(plan: Plan, consumer: Consumer = "toolkit", *, machine: Machine | None = None) -> Iterator[Path]:
    """Yield each stale lock of an extension that a run of a plan loads.

    Args:
        plan: Resolved plan.
        consumer: Which DeepSpeed configuration it runs with: the toolkit's, Trainer's or an Accelerate script's.
        machine: Machine to run on; this one when left out.

    Source:
        torch 2.13 utils/file_baton.py FileBaton; torch 2.14 utils/cpp_extension.py _jit_compile, _filelock.py.
    """
    machine = machine or Machine()
    yield from stale_locks_of(machine.compiles(plan, consumer), machine)


def stale_locks_of(extensions: Iterable[Extension], machine: Machine) -> Iterator[Path]:
    """Yield each stale lock of some extensions."""
    if machine.installed.torch >= FIRST_FLOCK:
        return
    locks = [machine.folder(extension) / "lock" for extension in extensions]
    suspects = {lock: identity for lock in locks if (identity := _ownerless(lock)) is not None}
    if suspects:
        time.sleep(_SETTLE_SECONDS)
    yield from (lock for lock, identity in suspects.items() if _ownerless(lock) == identity)


def _ownerless(lock: Path) -> tuple[int, int, int] | None:
    """Return the identity of a lock whose owner has ended; None if there is no lock, or its owner may be alive."""
    try:
        status = lock.stat()
    except OSError:
        return None
    identity = (status.st_dev, status.st_ino, status.st_mtime_ns)
    if _is_open(identity[:2]):
        return None
    all_seen = Path("/proc/self/fd").is_dir() and _file_system(lock) in _LOCAL
    return identity if all_seen or time.time() - status.st_mtime > STALE_SECONDS else None


def _is_open(file: tuple[int, int]) -> bool:
    """Return whether a process of this machine, of those that may be inspected, has a file open, given by device and inode."""
    for handle in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            status = handle.stat()
        except OSError:  # another user's, or gone
            continue
        if (status.st_dev, status.st_ino) == file:
            return True
    return False


def _file_system(path: Path) -> str:
    """Return the type of a file's file system; empty if unknown."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    kinds = {}
    for line in lines:
        fields, _, rest = line.partition(" - ")
        kinds[fields.split()[4].replace("\\040", " ")] = rest.split()[0]
    place = path.resolve()
    return next((kinds[str(folder)] for folder in place.parents if str(folder) in kinds), "")
