"""The environment of a worker process, and detection of the launcher that started this one.

Variables that differ by rank identify a worker; the others are settings, each with the reason that
`explain_environment` gives. A user's own value wins unless it contradicts the job.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from toolkit.errors import Problem, RunError, raise_all

Backend = Literal["nccl", "gloo"]
Launcher = Literal["torchrun", "deepspeed", "accelerate", "slurm", "openmpi"]

_ALLOCATOR_NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_CONTRADICTABLE = frozenset({"DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES"})
# Variables left by another launcher describe its processes, not ours:
# TORCHELASTIC_USE_AGENT_STORE alone turns every rank into a client of a store that nobody serves, and
# ACCELERATE_USE_FSDP changes how transformers loads weights.
_FOREIGN_PREFIXES = ("TORCHELASTIC_", "OMPI_COMM_WORLD_", "ACCELERATE_")
_FOREIGN_NAMES = frozenset(
    {
        *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"),  # torchrun
        *("CROSS_RANK", "CROSS_SIZE", "LOCAL_SIZE"),  # DeepSpeed
    }
)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIdentity:
    """Identity of this worker process: global rank, rank within its node, and number of ranks of the run."""

    rank: int
    local_rank: int
    world_size: int

    def as_environment(self) -> dict[str, str]:
        """Return the variables that DeepSpeed asks for by name, also when SLURM or Open MPI used others.

        Source:
            deepspeed 0.19.8, comm/comm.py init_distributed: without them it turns to mpi4py.
        """
        return {"RANK": str(self.rank), "LOCAL_RANK": str(self.local_rank), "WORLD_SIZE": str(self.world_size)}


def available_cpus() -> int:
    """Count the hardware threads that this process may use: its affinity mask, limited by the cgroup's CPU quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        if quota != "max":
            count = min(count, max(1, math.floor(int(quota) / int(period))))
    except (OSError, ValueError):
        return count  # no cgroup v2 here: only the mask limits the threads
    return count


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
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(master_port),
    }


def _is_foreign(name: str) -> bool:
    return name in _FOREIGN_NAMES or name.startswith(_FOREIGN_PREFIXES)


def detect_launcher(env: Mapping[str, str]) -> Launcher | None:
    """Return the name of the launcher that started this process as one of several ranks, or `None`.

    Accelerate comes first because it starts its workers through torchrun or DeepSpeed, SLURM last because it may
    wrap every other launcher. A batch script or an interactive shell under SLURM is not a launched worker.

    Source:
        accelerate 1.15 utils/launch.py prepare_*_env; deepspeed 0.19.8 launcher/launch.py main;
        torch 2.13 distributed/elastic/agent/server/local_elastic_agent.py _start_workers; `man srun`, `man mpirun`.
    """
    if "ACCELERATE_MIXED_PRECISION" in env:
        return "accelerate"
    if "CROSS_RANK" in env and "CROSS_SIZE" in env:
        return "deepspeed"
    if "TORCHELASTIC_RUN_ID" in env:
        return "torchrun"
    if "OMPI_COMM_WORLD_RANK" in env:
        return "openmpi"
    if "SLURM_PROCID" in env and env.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        return "slurm"
    return None


_RANK_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
_NAMES_BY_LAUNCHER: Mapping[Launcher, tuple[str, str, str]] = {
    "openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    "slurm": ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"),
}
_FIX = (
    "Start the workers with `toolkit launch` or torchrun, which set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and "
    "MASTER_PORT; or unset all five to run one process"
)


def rank_from_environment(env: Mapping[str, str]) -> WorkerIdentity | None:
    """Read this worker's identity from the environment.

    RANK, LOCAL_RANK and WORLD_SIZE decide if any is set; else those of Open MPI or of a SLURM step.

    Returns:
        The identity, or `None` when no launcher started this process.
    Raises:
        RunError: LAUNCH_ENV, with every variable that is missing, not a number or out of range.
    """
    launcher = detect_launcher(env)
    names = _RANK_NAMES
    if launcher is not None and launcher in _NAMES_BY_LAUNCHER and not any(name in env for name in _RANK_NAMES):
        names = _NAMES_BY_LAUNCHER[launcher]
    if not any(name in env for name in names):
        return None
    numbers = {name: _number(env.get(name)) for name in names}
    raise_all(RunError, _unreadable(env, numbers))
    rank, local_rank, world_size = (numbers[name] or 0 for name in names)
    raise_all(RunError, _inconsistent(env, names, rank=rank, local_rank=local_rank, world_size=world_size))
    return WorkerIdentity(rank=rank, local_rank=local_rank, world_size=world_size)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def _problem(name: str, message: str) -> Problem:
    return Problem(code="LAUNCH_ENV", key=name, message=message, fix=_FIX)


def _unreadable(env: Mapping[str, str], numbers: Mapping[str, int | None]) -> list[Problem]:
    present = ", ".join(f"{name}={env[name]}" for name in numbers if name in env)
    return [
        _problem(name, f"{name}={env[name]!r} is not a whole number")
        if name in env
        else _problem(name, f"{name} is not set, though {present} is: the worker's environment is incomplete")
        for name, number in numbers.items()
        if number is None
    ]


def _inconsistent(
    env: Mapping[str, str], names: tuple[str, str, str], *, rank: int, local_rank: int, world_size: int
) -> list[Problem]:
    rank_name, local_name, size_name = names
    found = []
    if rank >= world_size:
        found.append(
            _problem(rank_name, f"{rank_name}={rank} is not below {size_name}={world_size}: ranks count from 0")
        )
    local_size_name = "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in env else size_name
    local_size = _number(env.get(local_size_name))
    if local_size is None:
        found.append(_problem(local_size_name, f"{local_size_name}={env.get(local_size_name)!r} is not a whole number"))
    elif local_rank >= local_size:
        what = f"{local_name}={local_rank} is not below {local_size_name}={local_size}: ranks count from 0"
        found.append(_problem(local_name, what))
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
    if world_size > 1 and missing:
        what = f"{' and '.join(missing)} not set, though {size_name}={world_size}: ranks cannot find each other"
        found.append(_problem(missing[0], what))
    return found
