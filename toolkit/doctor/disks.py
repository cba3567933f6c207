"""Room and measured speed of the folders that a run writes and reads."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from toolkit.doctor.findings import Finding, found
from toolkit.doctor.kinds import Level
from toolkit.io import nearest_folder
from toolkit.launch.extensions import Machine, can_write
from toolkit.units import GIB, MIB, format_bytes

_FULL_BYTES = 2 * GIB
_SCARCE_BYTES = 50 * GIB
_LEAST_INODES = 1000
# Any local SSD writes five times as fast.
_SLOW_BYTES_PER_SECOND = 100e6
_TRIAL_BYTES = 64 * MIB
# Enough of a slow disk to tell its speed.
_TRIAL_SECONDS = 1.5
_NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "lustre", "beegfs", "gpfs", "ceph", "glusterfs", "9p", "virtiofs", "fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse"})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A folder that a run uses.

    Args:
        title: What it is for.
        path: Folder; it need not exist.
        variable: What names another one, as a command.
        large: Whether weights or checkpoints go there: its speed is measured.
        beside: Folder whose disk is measured already, or None.
    """

    title: str
    path: Path
    variable: str
    large: bool
    beside: Path | None = None


def places(output: Path, environment: Mapping[str, str] | None = None) -> tuple[Place, ...]:
    """Return the folders that runs use: output, the hub's cache, compiled extensions, temporary files.

    Args:
        output: Folder of checkpoints.
        environment: Environment variables of a run; those of this process when left out.

    Source:
        huggingface_hub constants.py HF_HOME, HF_HUB_CACHE; torch utils/cpp_extension.py _get_build_directory.
    """
    env = os.environ if environment is None else environment
    cache = Path(env.get("XDG_CACHE_HOME") or Path(env.get("HOME", "/"), ".cache"))
    home = Path(env.get("HF_HOME") or cache / "huggingface")
    hub = Path(env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE") or home / "hub")
    return (
        Place(title="output folder", path=output, variable="set train.output_dir", large=True),
        Place(
            title="the hub's cache", path=hub.expanduser(), variable="export HF_HOME=FOLDER", large=True, beside=output
        ),
        Place(
            title="compiled extensions",
            path=Machine(environment=env).cache,
            variable="export TORCH_EXTENSIONS_DIR=FOLDER",
            large=False,
        ),
        Place(
            title="temporary files", path=Path(env.get("TMPDIR", "/tmp")), variable="export TMPDIR=FOLDER", large=False
        ),
    )


def disk_findings(place: Place) -> Iterator[Finding]:
    """Yield what is wrong with the disk of one folder; write and read a file there for a moment."""
    named = f"{place.title}, {place.path}"
    if not can_write(place.path):
        level: Level | None = None if place.large else "warning"
        yield found("DISK_UNWRITABLE", f"{named}, cannot be written", level=level, repair=place.variable)
        return
    folder = nearest_folder(place.path)
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    if status.f_files and status.f_favail < _LEAST_INODES:
        yield found("DISK_INODES", f"{named}: {status.f_favail} inodes are free of {status.f_files}", path=folder)
    kind = file_system_of(folder)
    if kind in _NETWORK:
        yield found("DISK_NETWORK", f"{named}, is on {kind}", repair=place.variable)
    if free < (_FULL_BYTES if place.large else _FULL_BYTES / 4):
        yield found("DISK_FULL", f"{named}: {format_bytes(free)} are free", path=folder, repair=place.variable)
        return
    if place.large and free < _SCARCE_BYTES:
        yield found("DISK_SPACE", f"{named}: {format_bytes(free)} are free", repair=place.variable)
    beside = None if place.beside is None else nearest_folder(place.beside)
    if not place.large or (beside is not None and beside.stat().st_dev == folder.stat().st_dev):
        yield found("DISK", f"{named}: {format_bytes(free)} free")
        return
    try:
        written, read = trial(folder)
    except OSError as error:
        yield found("DISK_UNWRITABLE", f"{named}: {error.strerror}", repair=place.variable)
        return
    speeds = f"writes {written / 1e6:,.0f} MB/s, reads {read / 1e6:,.0f}"
    if written < _SLOW_BYTES_PER_SECOND:
        yield found("DISK_SLOW", f"{named}: {speeds}", repair=place.variable)
    yield found("DISK", f"{named}: {format_bytes(free)} free; {speeds}")


def trial(folder: Path) -> tuple[float, float]:
    """Write a file to the disk and read it back from there; return the speed of both in bytes a second.

    Raises:
        OSError: The disk is full, or refuses.
    """
    chunk = os.urandom(MIB)
    with tempfile.TemporaryFile(dir=folder, prefix=".toolkit-doctor-") as file:
        descriptor, size, began = file.fileno(), 0, time.perf_counter()
        while size < _TRIAL_BYTES and time.perf_counter() - began < _TRIAL_SECONDS:
            size += os.write(descriptor, chunk)
        os.fsync(descriptor)
        written = size / max(time.perf_counter() - began, 1e-6)
        if hasattr(os, "posix_fadvise"):  # or it would be read from memory
            os.posix_fadvise(descriptor, 0, size, os.POSIX_FADV_DONTNEED)
        os.lseek(descriptor, 0, os.SEEK_SET)
        began, seen = time.perf_counter(), 0
        while (part := os.read(descriptor, MIB)) and time.perf_counter() - began < _TRIAL_SECONDS:
            seen += len(part)
    return written, seen / max(time.perf_counter() - began, 1e-6)


def file_system_of(folder: Path) -> str:
    """Return the type of a folder's file system; empty if unknown."""
    kinds = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    place = folder.resolve()
    return next((kinds[str(each)] for each in (place, *place.parents) if str(each) in kinds), "")
