"""The environment of a worker process.

Variables that differ by rank identify a worker; the others are settings, each with the reason that
`explain_environment` gives. A user's own value wins unless it contradicts the job.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from toolkit.launch.cgroups import MOUNT, OWN, own_groups
from toolkit.launch.identity import LAUNCHED, OF_OTHER_LAUNCHERS

Backend = Literal["nccl", "gloo"]

_ALLOCATOR_NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_CONTRADICTABLE = frozenset({"DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES"})
# Variables left by another launcher describe its processes, not ours:
# TORCHELASTIC_USE_AGENT_STORE alone turns every rank into a client of a store that nobody serves, and
# ACCELERATE_USE_FSDP changes how transformers loads weights.
_FOREIGN_PREFIXES = ("TORCHELASTIC_", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_", "ACCELERATE_")


PLAN_VARIABLE = "TOOLKIT_PLAN"  # where a user's script finds the plan


def python_module(name: str) -> list[str]:
    """Return the command that runs a toolkit module, whatever files lie in the working directory.

    `python -m` would put that folder before the standard library, and a queue.py or random.py of the user's instead.
    """
    return [sys.executable, "-P", "-m", name]


class Setting(NamedTuple):
    """The value of one environment variable and why it has it."""

    value: str
    reason: str


def available_cpus() -> int:
    """Count the hardware threads that this process may use: its affinity mask, limited by the cgroup's CPU quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return count if quota is None else min(count, max(1, math.floor(quota)))


def cpu_quota(mount: Path = MOUNT, own: Path = OWN) -> float | None:
    """Return how many processors' time the cgroups of this process allow together, the least of all; None without a quota.

    Args:
        mount: Where they are mounted, version 2 or 1.
        own: File with this process's place among them.

    Source:
        Linux Documentation/admin-guide/cgroup-v2.rst (cpu.max), scheduler/sched-bwc.rst (cpu.cfs_quota_us).
    """
    found = [quota for group in own_groups("cpu", mount=mount, own=own) if (quota := _quota_of(group)) is not None]
    return min(found, default=None)


def _quota_of(folder: Path) -> float | None:
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            quota, period = " ".join((folder / name).read_text(encoding="ascii") for name in names).split()
            return None if quota in ("max", "-1") else int(quota) / int(period)
        except (OSError, ValueError):
            continue
    return None


def explain_environment(
    *, base: Mapping[str, str], local_world_size: int, backend: Backend, cpu_threads: int | None
) -> dict[str, Setting]:
    """Return every setting that is the same for all ranks, with its reason.

    Args:
        base: The user's environment; `{}` for files that another machine will run.
        local_world_size: Number of processes per node.
        backend: `nccl` for GPUs, `gloo` for CPU processes.
        cpu_threads: Hardware threads per node; `None` counts those that this process may use.
    Returns:
        Variable name → (value, reason), in the order in which they should be written.
    """
    threads = max(1, (available_cpus() if cpu_threads is None else cpu_threads) // local_world_size)
    ours = {
        "OMP_NUM_THREADS": Setting(
            str(threads),
            "cores divided among the node's processes: CPU Adam and the data loader use them, "
            "while torchrun's default of 1 starves both",
        ),
        "TOKENIZERS_PARALLELISM": Setting(
            "false", "data loader workers are forked, and tokenizers' thread pool does not survive a fork"
        ),
        "PYTHONUNBUFFERED": Setting("1", "the last lines of a killed rank reach its log"),
        "PYTHONFAULTHANDLER": Setting("1", "a crash in native code prints the Python stack"),
        **(_GPU_SETTINGS if backend == "nccl" else _CPU_SETTINGS),
    }
    if any(name in base for name in _ALLOCATOR_NAMES):
        ours.pop("PYTORCH_CUDA_ALLOC_CONF", None)
    return {
        name: Setting(base[name], "set by the user") if name in base and name not in _CONTRADICTABLE else setting
        for name, setting in ours.items()
    }


# On a GPU that is nearly full torch unmaps freed memory and maps it elsewhere, page by page and in most steps. At 128
# MiB at a time that takes a quarter of what it takes by its default of 20 (1 and 4 ms/GiB on an H200).
ALLOCATOR = "expandable_segments:True,large_segment_size_mb:128"


def other_allocator(base: Mapping[str, str]) -> str | None:
    """Return the user's own setting of torch's allocator, as `NAME=value`, if it differs from ours: launches keep it.

    Args:
        base: Environment that launches inherit.
    """
    found = ((name, base[name]) for name in _ALLOCATOR_NAMES if name in base)
    return next((f"{name}={value}" for name, value in found if value != ALLOCATOR), None)


_GPU_SETTINGS = {
    "PYTORCH_CUDA_ALLOC_CONF": Setting(
        ALLOCATOR,
        "segments grow in place, so little of a card is lost to fragmentation; large pages keep remapping cheap on a "
        "nearly full card",
    ),
    "DS_ACCELERATOR": Setting(
        "cuda", "spares DeepSpeed the probing of other vendors (accelerator/real_accelerator.py get_accelerator)"
    ),
}
_CPU_SETTINGS = {
    "DS_ACCELERATOR": Setting(
        "cpu", "DeepSpeed would use any GPU it finds (accelerator/real_accelerator.py get_accelerator)"
    ),
    "CUDA_VISIBLE_DEVICES": Setting("", "a job on CPU neither sees nor uses a GPU"),
}


def worker_environment(
    *,
    base: Mapping[str, str],
    rank: int,
    local_rank: int,
    world_size: int,
    local_world_size: int,
    master_addr: str,
    master_port: int,
    backend: Backend,
    cpu_threads: int | None,
) -> dict[str, str]:
    """Return the complete environment of one worker.

    Args:
        base: Environment to inherit, usually `os.environ`; variables of another launcher are dropped.
        rank: Global rank.
        local_rank: Rank within the node, which is also the index of its GPU.
        world_size: Number of ranks of the run.
        local_world_size: Number of ranks on this node.
        master_addr: Host of rank 0.
        master_port: TCP port of the rendezvous on that host.
        backend: `nccl` for GPUs, `gloo` for CPU processes.
        cpu_threads: Hardware threads per node; `None` counts those that this process may use.
    """
    kept = {name: value for name, value in base.items() if not _is_foreign(name)}
    settings = explain_environment(
        base=base, local_world_size=local_world_size, backend=backend, cpu_threads=cpu_threads
    )
    return {
        **kept,
        **{name: setting.value for name, setting in settings.items()},
        LAUNCHED: "1",
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(master_port),
    }


def _is_foreign(name: str) -> bool:
    return name in OF_OTHER_LAUNCHERS or name.startswith(_FOREIGN_PREFIXES)
