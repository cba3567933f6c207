"""Which rank this process is, from the variables of launchers and schedulers, which this module and `rendezvous` alone read.

RANK, LOCAL_RANK and WORLD_SIZE decide. What of them is not set, a scheduler that starts one process a rank says in variables
of its own: SLURM, Open MPI, MPICH with Intel MPI, and MVAPICH. Where rank 0 listens is MASTER_ADDR and MASTER_PORT or, if
those are not set, follows from the scheduler's list of nodes and from its id of the job, which all ranks see alike.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from toolkit.errors import Problem, RunError, raise_all
from toolkit.launch.hosts import tasks_of_node
from toolkit.launch.rendezvous import JOBS_PORT, first_host, port_of_job, port_that_is_set
from toolkit.units import whole_number

Launcher = Literal[
    "toolkit", "torchrun", "deepspeed", "accelerate", "slurm", "openmpi", "mpich", "mvapich", "skypilot", "variables"
]

# Marks a rank of our own launcher, whose RANK is then no contradiction to the variables of the scheduler around it.
LAUNCHED = "TOOLKIT_LAUNCHED"
# Number of nodes, which `--hosts` tells each of them; it wins over what else is set there.
NUM_NODES = "TOOLKIT_NUM_NODES"
_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
_FIX = (
    "Start the workers with `toolkit launch` or torchrun, which set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and "
    "MASTER_PORT; or unset all five to run one process"
)
LAUNCHER_NAMES: Mapping[Launcher, str] = {
    "toolkit": "toolkit's launcher",
    "torchrun": "torchrun",
    "deepspeed": "DeepSpeed's launcher",
    "accelerate": "accelerate launch",
    "slurm": "srun",
    "openmpi": "Open MPI's mpirun",
    "mpich": "MPICH's or Intel MPI's mpirun",
    "mvapich": "MVAPICH's launcher",
    "skypilot": "SkyPilot",
    "variables": "the environment",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIdentity:
    """Identity of this worker process.

    Args:
        rank: Global rank.
        local_rank: Rank within its node.
        world_size: Number of ranks of the run.
        local_world_size: Number of ranks of its node; None where no variable says it.
        master_addr: Host of rank 0; None for a run of one rank.
        master_port: TCP port on it.
        launcher: What started this process; None where only the usual variables are set.
        variables: Names of the variables that were read, in the order of their importance.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    launcher: Launcher | None = None
    variables: tuple[str, ...] = field(default=(), compare=False)

    def as_environment(self) -> dict[str, str]:
        """Return the variables that torch and DeepSpeed ask for by name, also when SLURM or MPI used others.

        Source:
            deepspeed 0.19.8, comm/comm.py init_distributed: without them it turns to mpi4py.
        """
        known = {
            "RANK": self.rank,
            "LOCAL_RANK": self.local_rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": self.master_port,
        }
        return {name: str(value) for name, value in known.items() if value is not None}

    @property
    def spans_nodes(self) -> bool:
        """True unless all ranks are known to be on this machine."""
        return self.world_size > 1 and self.local_world_size != self.world_size

    def card_index(self, num_visible: int) -> int | None:
        """Return the index of this rank's card among those that its process sees; None if none of them is its own.

        Where a scheduler starts each rank it can show it its own card alone, which is number 0 there: `srun --gpus-per-task=1`, or
        a script under mpirun that sets CUDA_VISIBLE_DEVICES.
        """
        if self.local_rank < num_visible:
            return self.local_rank
        return 0 if num_visible == 1 and self.is_of_scheduler else None

    @property
    def is_of_scheduler(self) -> bool:
        """True if srun or mpirun has started this process as one of several."""
        return self.launcher in _SCHEDULERS

    def describe(self) -> str:
        """Return in one line what was found, and by which variables."""
        where = "" if self.master_addr is None else f", rendezvous at {self.master_addr}:{self.master_port}"
        by = LAUNCHER_NAMES[self.launcher or "variables"]
        size = f"rank {self.rank} of {self.world_size}, local rank {self.local_rank}"
        return f"{size}{where}; found by {', '.join(self.variables)} of {by}"


class _Names(NamedTuple):
    """The variables in which a scheduler says the same as RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE."""

    rank: str
    local_rank: str
    world_size: str
    local_world_size: str


# Open MPI: docs, "Environment variables set for MPI applications". MPICH and Intel MPI: hydra's pmiserv and proxy. MVAPICH:
# its user guide, mpirun_rsh. SLURM: man srun; its counts of tasks by node are read by `tasks_of_node`.
_SCHEDULERS: Mapping[Launcher, _Names] = {
    "openmpi": _Names(
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"
    ),
    "mvapich": _Names(
        "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"
    ),
    "mpich": _Names("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS"),
    "slurm": _Names("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
}

# What launchers and schedulers set is theirs by these names, beside those by which a user or a cloud says the same.
_PREFIXES = (
    *("ACCELERATE_", "TORCHELASTIC_", "SLURM", "OMPI_", "PMI", "MV2_", "MPI_LOCAL", "SKYPILOT_", "AZ_BATCH_"),
    LAUNCHED,
)
OF_OTHER_LAUNCHERS = frozenset(
    {
        *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"),  # torchrun
        *("CROSS_RANK", "CROSS_SIZE", "LOCAL_SIZE"),  # DeepSpeed
        *("PMI_RANK", "PMI_SIZE", "PMI_FD", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI
    }
)
_PLACE = frozenset({*_NAMES, "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", NUM_NODES})


def tells_place(name: str) -> bool:
    """Return whether a variable says which process, node or job this is: it is false on any other machine.

    These are all that `detect_launcher`, `rank_from_environment` and `find_place` read, and others of the same launchers.
    """
    return name in _PLACE or name in OF_OTHER_LAUNCHERS or name.startswith(_PREFIXES)


def detect_launcher(env: Mapping[str, str]) -> Launcher | None:
    """Return the name of the launcher that started this process as one of several, or `None`.

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
    if LAUNCHED in env:
        return "toolkit"
    if "OMPI_COMM_WORLD_RANK" in env:
        return "openmpi"
    if "MV2_COMM_WORLD_RANK" in env:
        return "mvapich"
    # srun --mpi=pmi2 sets PMI_RANK too, but no MPI_LOCALRANKID.
    if "PMI_RANK" in env and "MPI_LOCALRANKID" in env:
        return "mpich"
    if "SLURM_PROCID" in env and env.get("SLURM_STEP_NUM_TASKS", "1") != "1" and not _is_interactive(env):
        return "slurm"
    return None


def _is_interactive(env: Mapping[str, str]) -> bool:
    """Return whether this runs in a shell that `srun --pty` opened: its variables are those of the shell's own task.

    A batch script that was submitted from such a shell has inherited the variable, but has no terminal.
    """
    return "SLURM_PTY_PORT" in env and has_terminal()


def has_terminal() -> bool:
    """Return whether this process has a controlling terminal."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def rank_from_environment(env: Mapping[str, str], *, master_port: int | None = None) -> WorkerIdentity | None:
    """Read this worker's identity from the environment.

    Args:
        env: Environment variables of this process.
        master_port: The job's own port, if it names one; MASTER_PORT wins over it, and it over what follows from a scheduler's id.

    Returns:
        The identity, or `None` when no launcher started this process.

    Raises:
        RunError: LAUNCH_ENV, with every variable that is missing, not a number, out of range, or contradicts another.
    """
    launcher = detect_launcher(env)
    names = _SCHEDULERS.get(launcher) if launcher is not None else None
    if names is None and not any(name in env for name in _NAMES):
        _refuse_pmix_alone(env)
        return None
    # What is set wins; the scheduler fills in the rest.
    sources = [ours if ours in env else theirs for ours, theirs in zip(_NAMES, names or _NAMES, strict=False)]
    if names is not None and _is_number_of_card(env, names):
        sources[1] = names.local_rank
    numbers = {name: whole_number(env.get(name)) for name in sources}
    raise_all(RunError, _unreadable(env, numbers))
    rank, local_rank, world_size = (numbers[name] or 0 for name in sources)
    local_size, local_source = _local_world_size(env, launcher)
    addr, port, address_sources = _master(
        env, launcher, world_size=world_size, local_world_size=local_size, master_port=master_port
    )
    found = [
        *_contradictions(env, names),
        *_out_of_range(sources, rank, local_rank, world_size, local_size, local_source),
        *_no_address(sources[2], world_size, addr, port),
    ]
    raise_all(RunError, found)
    return WorkerIdentity(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_size,
        master_addr=addr,
        master_port=port,
        launcher=launcher,
        variables=(*sources, *([local_source] if local_size else []), *address_sources),
    )


def _problem(name: str, message: str, fix: str = _FIX) -> Problem:
    return Problem(code="LAUNCH_ENV", key=name, message=message, fix=fix)


def _refuse_pmix_alone(env: Mapping[str, str]) -> None:
    """Refuse `prun` and others that tell a process its rank but not their number; an interactive step has it too."""
    if "PMIX_RANK" in env and "SLURM_JOB_ID" not in env:
        message = f"PMIX_RANK={env['PMIX_RANK']} is set, but no variable says how many ranks there are"
        fix = "Start the processes with mpirun, srun or torchrun; or unset PMIX_RANK to run on this machine alone"
        raise RunError(_problem("PMIX_RANK", message, fix))


def _local_world_size(env: Mapping[str, str], launcher: Launcher | None) -> tuple[int | None, str]:
    if "LOCAL_WORLD_SIZE" in env:
        size = whole_number(env["LOCAL_WORLD_SIZE"])
        if size is None:
            what = f"LOCAL_WORLD_SIZE={env['LOCAL_WORLD_SIZE'][:80]!r} is not a whole number"
            raise RunError(_problem("LOCAL_WORLD_SIZE", what))
        return size, "LOCAL_WORLD_SIZE"
    if launcher is None or launcher not in _SCHEDULERS:
        return None, ""
    name = _SCHEDULERS[launcher].local_world_size
    if launcher == "slurm":
        node = whole_number(env.get("SLURM_NODEID"))
        return (None if node is None else tasks_of_node(env.get(name, ""), node)), name
    return whole_number(env.get(name)), name


def _unreadable(env: Mapping[str, str], numbers: Mapping[str, int | None]) -> list[Problem]:
    present = ", ".join(f"{name}={env[name][:80]}" for name in numbers if name in env)
    return [
        _problem(name, f"{name}={env[name][:80]!r} is not a whole number")
        if name in env
        else _problem(name, f"{name} is not set, though {present} is: the worker's environment is incomplete")
        for name, number in numbers.items()
        if number is None
    ]


def _is_number_of_card(env: Mapping[str, str], names: _Names) -> bool:
    """Return whether LOCAL_RANK is the number of the only card that a scheduler shows a rank.

    Such ranks are told 0 for what takes it for a card's number (`toolkit.distributed.device.tell_card`), whichever of their node they are.
    """
    same = all(
        env.get(ours) == env.get(theirs) for ours, theirs in (("RANK", names.rank), ("WORLD_SIZE", names.world_size))
    )
    return env.get("LOCAL_RANK") == "0" and same and whole_number(env.get(names.local_rank)) is not None


def _contradictions(env: Mapping[str, str], names: _Names | None) -> list[Problem]:
    """Compare what is set with what the scheduler says: what a batch script exports is the same in all its processes."""
    if names is None or names.rank not in env:
        return []
    size, theirs = env.get("WORLD_SIZE", env.get(names.world_size)), env.get(names.world_size)
    if "RANK" not in env and size != theirs:
        name, message = "WORLD_SIZE", f"WORLD_SIZE={size} contradicts {names.world_size}={theirs}"
    elif "RANK" in env and size == theirs and env["RANK"] != env[names.rank]:
        name, message = "RANK", f"RANK={env['RANK']} contradicts {names.rank}={env[names.rank]} of {theirs} processes"
    else:
        return []
    what = f"{message}: a variable that the batch script exports is the same in all of them"
    return [_problem(name, what, "Unset RANK, LOCAL_RANK and WORLD_SIZE, which are found without them")]


def _out_of_range(
    sources: list[str], rank: int, local_rank: int, world_size: int, local_size: int | None, local_source: str
) -> list[Problem]:
    rank_name, local_name, size_name = sources
    found = []
    if rank >= world_size:
        found.append(
            _problem(rank_name, f"{rank_name}={rank} is not below {size_name}={world_size}: ranks count from 0")
        )
    limit_name, limit = (size_name, world_size) if local_size is None else (local_source, local_size)
    if local_rank >= limit:
        what = f"{local_name}={local_rank} is not below {limit_name}={limit}: ranks count from 0"
        found.append(_problem(local_name, what))
    return found


def _no_address(size_name: str, world_size: int, addr: str | None, port: int | None) -> list[Problem]:
    missing = [name for name, value in (("MASTER_ADDR", addr), ("MASTER_PORT", port)) if value is None]
    if world_size < 2 or not missing:
        return []
    what = f"{' and '.join(missing)} not set, though {size_name}={world_size}: ranks cannot find each other"
    return [_problem(missing[0], what)]


def _master(
    env: Mapping[str, str],
    launcher: Launcher | None,
    *,
    world_size: int,
    local_world_size: int | None,
    master_port: int | None,
) -> tuple[str | None, int | None, tuple[str, ...]]:
    """Return host and port of rank 0, and the variables that say them."""
    addr, addr_source = env.get("MASTER_ADDR") or None, "MASTER_ADDR"
    port, port_source = port_that_is_set(env), "MASTER_PORT"
    if launcher in _SCHEDULERS and world_size > 1:
        if addr is None:
            addr, addr_source = first_host(env, launcher, on_one_machine=local_world_size == world_size)
        if port is None:
            port, port_source = (master_port, JOBS_PORT) if master_port else port_of_job(env, launcher)
    found = [name for name, value in ((addr_source, addr), (port_source, port)) if value is not None and name]
    return addr, port, tuple(found)
