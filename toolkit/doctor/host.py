"""RAM, limits of this process, shared memory and cores."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path

from toolkit.doctor.findings import Finding, found
from toolkit.launch.environment import available_cpus
from toolkit.launch.nvme import may_lock
from toolkit.launch.ram import Memory, read_memory
from toolkit.units import GIB, format_bytes, whole_number

# Below this a 1B model is hardly loaded: torch and DeepSpeed take 1.5 GiB a rank, pinned buffers and data the rest.
_LEAST_FREE_BYTES = 4 * GIB
# NCCL takes up to 10 MiB a rank and channel, loaders what their batches take; docker's default is 64 MiB.
_LEAST_SHARED_BYTES = GIB
_LEAST_FILES = 4096


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
