"""RAM, limits of this process, shared memory and cores."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from toolkit.doctor.findings import Finding, found
from toolkit.launch.environment import available_cpus
from toolkit.launch.nvme import may_lock
from toolkit.units import GIB, format_bytes, whole_number

# Below this a 1B model is hardly loaded: torch and DeepSpeed take 1.5 GiB a rank, pinned buffers and data the rest.
_LEAST_FREE_BYTES = 4 * GIB
# NCCL takes up to 10 MiB a rank and channel, loaders what their batches take; docker's default is 64 MiB.
_LEAST_SHARED_BYTES = GIB
_LEAST_FILES = 4096
# Start of a limit that means none, in cgroup v1 (memory.limit_in_bytes is the largest number of pages).
_NO_LIMIT_BYTES = 2**60
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """RAM: of the machine, free of it, and the limit of the container with what it has used; None without one."""

    total_bytes: int
    free_bytes: int
    limit_bytes: int | None = None
    used_of_limit_bytes: int = 0

    @property
    def left_bytes(self) -> int:
        """Bytes that a run can have: the free ones, within the limit."""
        left = self.free_bytes
        return left if self.limit_bytes is None else max(0, min(left, self.limit_bytes - self.used_of_limit_bytes))


def read_memory(cgroup: Path = _CGROUP) -> Memory:
    """Read RAM and the container's limit: cgroup v2's files, else v1's.

    Source:
        Linux Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst.
    """
    ram = psutil.virtual_memory()
    for limit_file, used_file in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit = _number(cgroup / limit_file)
        if limit is not None and limit < min(_NO_LIMIT_BYTES, ram.total):
            used = (_number(cgroup / used_file) or 0) - _cached(cgroup / limit_file)
            return Memory(
                total_bytes=ram.total, free_bytes=ram.available, limit_bytes=limit, used_of_limit_bytes=max(0, used)
            )
    return Memory(total_bytes=ram.total, free_bytes=ram.available)


def _cached(limit_file: Path) -> int:
    """Return the bytes of files in memory, which count as used and are given up when a process needs them."""
    try:
        lines = (limit_file.parent / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    counts = dict(line.split()[:2] for line in lines if len(line.split()) == 2)
    return int(counts.get("inactive_file", counts.get("total_inactive_file", 0)))


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such cgroup, or "max"
        return None


def host_findings(*, num_cards: int, environment: Mapping[str, str] | None = None) -> Iterator[Finding]:
    """Yield what is scarce on this machine.

    Args:
        num_cards: Number of GPUs.
        environment: Environment variables of a run; those of this process when left out.
    """
    memory = read_memory()
    yield from memory_findings(memory)
    yield from limit_findings()
    yield from shared_memory_findings(Path("/dev/shm"))
    yield from _cores(num_cards, os.environ if environment is None else environment)
    limit = "" if memory.limit_bytes is None else f", the container's limit {format_bytes(memory.limit_bytes)}"
    yield found(
        "HOST",
        f"RAM {format_bytes(memory.total_bytes)}, {format_bytes(memory.left_bytes)} free{limit}; {available_cpus()} cores",
    )


def memory_findings(memory: Memory) -> Iterator[Finding]:
    """Yield whether RAM is scarce or limited."""
    if memory.limit_bytes is not None:
        seen = f"the limit is {format_bytes(memory.limit_bytes)} of {format_bytes(memory.total_bytes)} of RAM"
        yield found("MEMORY_LIMIT", seen, gib=int(memory.limit_bytes / GIB))
    if memory.left_bytes < _LEAST_FREE_BYTES:
        yield found("MEMORY_LOW", f"{format_bytes(memory.left_bytes)} of RAM are free")


def limit_findings() -> Iterator[Finding]:
    """Yield which limits of this process are low."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < _LEAST_FILES:
        yield found("OPEN_FILES", f"a process may open {files} files, and raise that to {most}")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked != resource.RLIM_INFINITY and not may_lock():
        yield found("LOCKED_MEMORY", f"a process may lock {format_bytes(locked)} of memory")


def shared_memory_findings(folder: Path) -> Iterator[Finding]:
    """Yield whether the folder of shared memory is small, full or missing."""
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        yield found("SHARED_MEMORY", f"{folder} does not exist, or cannot be written", level="error")
        return
    status = os.statvfs(folder)
    total, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    if free < _LEAST_SHARED_BYTES:
        yield found("SHARED_MEMORY", f"{folder} has {format_bytes(free)} free of {format_bytes(total)}")


def _cores(num_cards: int, environment: Mapping[str, str]) -> Iterator[Finding]:
    cores = available_cpus()
    if num_cards and cores < 2 * num_cards:
        yield found("CPU_FEW", f"{cores} cores for {num_cards} card{'s' if num_cards > 1 else ''}")
    written = environment.get("OMP_NUM_THREADS", "")
    ranks = max(1, num_cards)
    if (whole_number(written) or 0) * ranks > cores:
        yield found(
            "CPU_OVERSUBSCRIBED",
            f"OMP_NUM_THREADS={written} on {cores} cores, for {ranks} rank{'s' if ranks > 1 else ''}",
        )
