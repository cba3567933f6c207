"""NUMA nodes: the processors and the memory that are near to a card, on machines with several sockets.

What crosses the link between two sockets moves at a third to a half of the rate of a node's own memory: copies between a card and
the host, and each step of an optimizer whose state is there.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from toolkit.launch.cgroups import own_groups

_SYS = Path("/sys")
_PROC = Path("/proc/self")
# Numbers of get_mempolicy and set_mempolicy (Linux arch/*/entry/syscalls, include/uapi/asm-generic/unistd.h).
_POLICY_CALLS = {"x86_64": (239, 238), "aarch64": (236, 237), "ppc64le": (260, 261)}
# include/uapi/linux/mempolicy.h. The preferred node's memory comes first and that of others when it is full; a strict policy would
# have the kernel end the process instead.
_DEFAULT, _PREFERRED = 0, 1
_MOST_NODES = 1024


def parse_numbers(text: str) -> frozenset[int]:
    """Read a list of numbers as the kernel writes it.

    >>> sorted(parse_numbers("0-2,8"))
    [0, 1, 2, 8]
    """
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def node_processors(sys: Path = _SYS) -> dict[int, frozenset[int]]:
    """Return the processors of each NUMA node that has some; empty where the system does not tell."""
    found = {}
    for folder in (sys / "devices/system/node").glob("node[0-9]*"):
        processors = _numbers_in(folder / "cpulist")
        if processors:
            found[int(folder.name.removeprefix("node"))] = processors
    return dict(sorted(found.items()))


def node_of_card(address: str, sys: Path = _SYS) -> int | None:
    """Return the NUMA node of a card; None where the system does not tell, as in many virtual machines.

    Args:
        address: PCI address, `0000:17:00.0`, also with the eight digits of NVML's domains.
        sys: Where sysfs is mounted.
    """
    domain, _, rest = address.lower().partition(":")
    try:
        node = int((sys / f"bus/pci/devices/{domain[-4:]}:{rest}/numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def restriction(
    environment: Mapping[str, str],
    *,
    allowed: frozenset[int] | None = None,
    sys: Path = _SYS,
    proc: Path = _PROC,
) -> str | None:
    """Return who has already chosen the processors or the memory of this process; None if nobody has.

    A cgroup's cpuset chooses the processors of a container, not of its processes: binding is within it. A job step of SLURM's is
    such a cgroup too, and there SLURM has chosen.

    Args:
        environment: Variables of this process.
        allowed: Processors that this process may use; by default its affinity mask.
        sys: Where sysfs is mounted.
        proc: Folder of this process in procfs.
    """
    allowed = frozenset(os.sched_getaffinity(0)) if allowed is None else allowed
    online = _numbers_in(sys / "devices/system/cpu/online") or allowed
    of_group = _cpuset(sys, proc) or online
    if not allowed >= of_group:
        return f"it may use {len(allowed)} of {len(of_group)} processors (taskset, numactl or its launcher)"
    if "SLURM_JOB_ID" in environment and not allowed >= online:
        return f"SLURM has given it {len(allowed)} of {len(online)} processors"
    if memory_policy() not in (None, _DEFAULT):
        return "it has a memory policy (numactl)"
    return None


def _cpuset(sys: Path, proc: Path) -> frozenset[int]:
    """Return the processors of this process's cgroup; empty where it has no cpuset."""
    for group in own_groups("cpuset", mount=sys / "fs/cgroup", own=proc / "cgroup"):
        for name in ("cpuset.cpus.effective", "cpuset.effective_cpus"):
            if found := _numbers_in(group / name):
                return found
    return frozenset()


def memory_policy() -> int | None:
    """Return the mode of this thread's memory policy, 0 for the default; None where the system does not tell."""
    calls = _POLICY_CALLS.get(platform.machine())
    if calls is None:
        return None
    mode = ctypes.c_int(0)
    failed = ctypes.CDLL(None, use_errno=True).syscall(calls[0], ctypes.byref(mode), None, 0, None, 0)
    return None if failed else mode.value


def _set_memory_policy(node: int | None) -> bool:
    """Have this thread, and those that it starts, prefer a node's memory; None: the default. Return whether the system agreed."""
    calls = _POLICY_CALLS.get(platform.machine())
    if calls is None:
        return False
    call = ctypes.CDLL(None, use_errno=True).syscall
    if node is None:
        return int(call(calls[1], _DEFAULT, None, 0)) == 0
    mask = (ctypes.c_uint64 * (_MOST_NODES // 64))()
    mask[node // 64] = 1 << node % 64
    return int(call(calls[1], _PREFERRED, mask, _MOST_NODES + 1)) == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """Processors and memory to which this process is bound, and what it had before.

    Args:
        node: NUMA node.
        prefers_memory: Whether the node's memory is preferred; a container may forbid that, and memory is then the node's as long
            as the bound threads touch it first, which is the system's default.
        before: Processors of each thread as they were.
    """

    node: int
    prefers_memory: bool
    before: Mapping[int, frozenset[int]]

    def release(self) -> None:
        """Give all threads of this process the processors that they had, and this one the default memory policy."""
        everywhere = self.before[os.getpid()]
        for thread in _threads():
            _set_processors(thread, self.before.get(thread, everywhere))
        if self.prefers_memory:
            _set_memory_policy(None)


def bind(node: int, processors: frozenset[int]) -> Binding:
    """Run all threads of this process on a node's processors, also those that they start; memory comes from it first."""
    before = {}
    for thread in _threads():
        try:
            before[thread] = frozenset(os.sched_getaffinity(thread))
        except OSError:  # it has ended meanwhile
            continue
        _set_processors(thread, processors)
    return Binding(node=node, prefers_memory=_set_memory_policy(node), before=before)


def _threads() -> list[int]:
    return [int(thread.name) for thread in (_PROC / "task").iterdir()]


def _set_processors(thread: int, processors: frozenset[int]) -> None:
    try:
        os.sched_setaffinity(thread, processors)
    except ProcessLookupError:  # it has ended meanwhile
        return


def _numbers_in(file: Path) -> frozenset[int]:
    try:
        return parse_numbers(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return frozenset()
