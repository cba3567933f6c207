"""RAM that a run can have on this machine, and whether that is enough for what a plan keeps there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from toolkit.errors import Problem
from toolkit.launch.cgroups import MOUNT, OWN, own_groups
from toolkit.planning.plan import Plan
from toolkit.planning.state_bytes import offloaded_bytes
from toolkit.units import format_bytes

# Start of a limit that means none, in cgroup v1 (memory.limit_in_bytes is the largest number of pages).
_NO_LIMIT_BYTES = 2**60
_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))


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


def read_memory(mount: Path = MOUNT, own: Path = OWN) -> Memory:
    """Read RAM and the limit that leaves least of it: a container's, or that of a batch system's job.

    Source:
        Linux Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst.
    """
    ram = psutil.virtual_memory()
    found = Memory(total_bytes=ram.total, free_bytes=ram.available)
    for group in own_groups("memory", mount=mount, own=own):
        for limit_file, used_file in _FILES:
            limit = _number(group / limit_file)
            if limit is None or limit >= min(_NO_LIMIT_BYTES, ram.total):
                continue
            used = max(0, (_number(group / used_file) or 0) - _cached(group / "memory.stat"))
            limited = Memory(
                total_bytes=ram.total, free_bytes=ram.available, limit_bytes=limit, used_of_limit_bytes=used
            )
            if found.limit_bytes is None or limited.left_bytes < found.left_bytes:
                found = limited
    return found


def too_little_memory(plan: Plan, memory: Memory | None = None) -> Iterator[Problem]:
    """Yield a problem if the ranks of this machine keep more in RAM than is left of it.

    Args:
        plan: Plan of the run.
        memory: RAM of this machine; read when left out.
    """
    needed = offloaded_bytes(plan)
    if needed is None:
        return
    memory = memory or read_memory()
    if needed <= memory.left_bytes:
        return
    key = "parallel.fsdp2.cpu_offload" if plan.job.parallel.fsdp2_options.cpu_offload else "parallel.offload"
    chosen = "cpu_offload=true" if "fsdp2" in key else f"offload={plan.profile.name}"
    limit = "" if memory.limit_bytes is None else f", under a limit of {format_bytes(memory.limit_bytes)} (cgroup)"
    ranks = plan.job.cluster.gpus_per_node
    yield Problem(
        code="HOST_MEMORY",
        key=key,
        message=f"{chosen} puts about {format_bytes(needed)} of {ranks} rank{'s' if ranks > 1 else ''} into the RAM of this machine, "
        f"of whose {format_bytes(memory.total_bytes)} {format_bytes(memory.left_bytes)} are left{limit}",
        fix="End what uses the memory, raise the limit of the container or of the job, set cluster.nodes to more, or train by LoRA; "
        "`toolkit estimate` shows each part",
    )


def _cached(file: Path) -> int:
    """Return the bytes of files in memory, which count as used and are given up when a process needs them.

    Those of the groups inside count too, as in the usage: cgroup v1 lists them as `total_...`, v2 under the plain names.
    """
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    counts = dict(line.split()[:2] for line in lines if len(line.split()) == 2)
    return sum(int(counts.get(f"total_{name}", counts.get(name, 0))) for name in ("inactive_file", "active_file"))


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such cgroup, or "max"
        return None
