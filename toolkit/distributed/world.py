"""Live process groups of a grid: this process's rank, device and groups."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from toolkit.distributed.deepspeed_private import reset_groups, skip_shared_memory_build
from toolkit.distributed.device import card_name, check_own_cards, rank_device, tell_card
from toolkit.distributed.nodes import NodeName, announce_node, read_nodes
from toolkit.distributed.process_groups import forget_groups, join_group
from toolkit.distributed.progress import Progress
from toolkit.errors import PlanError, RunError, ToolkitError
from toolkit.launch.environment import ALLOCATOR
from toolkit.launch.identity import WorkerIdentity, rank_from_environment
from toolkit.launch.interfaces import gloo_environment
from toolkit.topology.grid import Coordinate, Grid

# Collectives time out after this long. Long enough for the first step to compile kernels and for a
# rank 0 that tokenises a large data set while the others wait.
DEFAULT_TIMEOUT = timedelta(minutes=30)

# The launcher's variables as they were before `init_world` set them.
_variables_before: dict[str, str | None] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The place of one process: its rank, device and groups.

    Args:
        rank: Global rank.
        local_rank: Rank within the node.
        device: Device of its tensors.
        grid: Grid of all ranks.
        coordinate: This rank's place in the grid.
        dp_group: Group of ranks with the same parameters and different data.
        tp_group: Group of ranks that shard each layer and see the same data; None without tensor parallelism.
        context_group: Group of data-parallel ranks that share each row by slices of its sequence; None without context parallelism.
        owns_groups: Whether `init_world` joined the process groups, so that `destroy_world` leaves them.
        progress: What this rank does, for a watch over all of them.
        nodes: The machines by name, if there are several.
    """

    rank: int
    local_rank: int
    device: torch.device
    grid: Grid
    coordinate: Coordinate
    dp_group: dist.ProcessGroup
    tp_group: dist.ProcessGroup | None
    owns_groups: bool
    context_group: dist.ProcessGroup | None = None
    progress: Progress = field(default_factory=Progress, repr=False, compare=False)
    nodes: tuple[NodeName, ...] = ()

    @property
    def is_main(self) -> bool:
        """True if this is global rank 0, which prints and writes."""
        return self.rank == 0

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.grid.world_size

    def group(self, kind: str) -> dist.ProcessGroup:
        """Return this rank's group of a kind: `dp`, `tp`, `pp`, or another of `toolkit.topology.KINDS`.

        Collectives:
            At the first call all ranks create the groups of this kind.
        """
        if kind == "dp":
            return self.dp_group
        if kind == "tp" and self.tp_group is not None:
            return self.tp_group
        return join_group(self.grid, self.rank, kind)

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier()

    def agree(self, error: Exception | None) -> None:
        """Wait for all ranks, and raise on each of them the error of the lowest rank that has one.

        Raises:
            Exception: The rank's own error or another rank's ToolkitError unchanged; any other error as RANK_FAILED.
        """
        shared = error if error is None or isinstance(error, ToolkitError) else repr(error)
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, shared)
        first = next((rank for rank, item in enumerate(found) if item is not None), None)
        if first is None:
            return
        if error is not None:
            raise error
        if isinstance(found[first], ToolkitError):
            raise found[first]
        raise RunError.of(
            code="RANK_FAILED",
            message=f"rank {first} failed with {found[first]}, so rank {self.rank} ends too",
            fix=f"See the trace of rank {first}",
        )


def init_world(
    grid: Grid,
    *,
    backend: str,
    environment: Mapping[str, str] | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
) -> World:
    """Join the process groups that the launcher's variables describe; a grid of one rank needs no launcher.

    Args:
        grid: Grid of the plan.
        backend: `nccl` or `gloo`.
        environment: Environment variables of the launcher; those of this process when left out.

    Raises:
        PlanError: WORLD_SIZE if the launcher started a number of processes other than the plan's ranks;
            WORLD_NO_GPU if the plan needs CUDA and this process sees none.
        RunError: LAUNCH_ENV, MASTER_ADDR, WORLD_CARD_SHARED.
    """
    environment = os.environ if environment is None else environment
    identity = rank_from_environment(environment)
    identity = identity or WorkerIdentity(rank=0, local_rank=0, world_size=1)
    rank, local_rank, size = identity.rank, identity.local_rank, identity.world_size
    if size != grid.world_size:
        raise PlanError.of(
            code="WORLD_SIZE",
            key="cluster.gpus_per_node",
            message=f"the launcher started {size} process{'es' if size > 1 else ''}, the plan has {grid.world_size} ranks",
            fix=f"Start {grid.world_size} processes (`toolkit train`, torchrun, deepspeed or accelerate launch), or change "
            "cluster.gpus_per_node and cluster.nodes",
        )
    _prepare_process(backend, identity)
    if grid.pp > 1 and backend == "nccl":
        _prepare_messages()
    device = rank_device(backend, identity)
    tell_card(device)
    owns_groups = not dist.is_initialized()
    nodes: tuple[NodeName, ...] = ()
    if owns_groups:
        reset_groups()
        nodes = _initialize(backend, identity, timeout=timeout, device=device)
    _tell_deepspeed(backend)
    coordinate = grid.coordinate(rank)
    return World(
        rank=rank,
        local_rank=local_rank,
        device=device,
        grid=grid,
        coordinate=coordinate,
        dp_group=join_group(grid, rank, "dp"),
        tp_group=join_group(grid, rank, "tp") if grid.tp > 1 else None,
        owns_groups=owns_groups,
        context_group=join_group(grid, rank, "cp") if grid.cp > 1 else None,
        nodes=nodes,
    )


def destroy_world(world: World) -> None:
    """Leave the process groups that `init_world` joined; those that the caller's script joined are kept.

    The launcher's variables are put back: what a notebook starts next must not take its process for a rank.
    """
    if not world.owns_groups or not dist.is_initialized():
        return
    dist.destroy_process_group()
    forget_groups()
    for name, value in _variables_before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _variables_before.clear()


def _prepare_process(backend: str, identity: WorkerIdentity) -> None:
    """Set the environment variables that torch and DeepSpeed read, if the launcher has not."""
    # deepspeed comm/comm.py and zero/utils.py read them by name; Open MPI, SLURM and a single process set others or none.
    ours = identity.as_environment() | gloo_environment(identity, os.environ)
    # As launches set it: DeepSpeed would use any other accelerator that this variable names, or that it finds.
    ours["DS_ACCELERATOR"] = "cuda" if backend == "nccl" else "cpu"
    for name, value in ours.items():
        _variables_before.setdefault(name, os.environ.get(name))
        os.environ[name] = value
    if backend == "nccl":
        if "PYTORCH_ALLOC_CONF" not in os.environ:
            # Read when CUDA starts: the same 8 B run reserves 56 GiB instead of 68.
            os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", ALLOCATOR)
        return
    from deepspeed.accelerator import get_accelerator, set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    if get_accelerator().device_name() != "cpu":
        set_accelerator(CPU_Accelerator())


def _prepare_messages() -> None:
    # CUDA maps its streams to this many queues, 8 by default, and some frameworks set 1. A message that waits in the
    # queue of a kernel would delay that kernel, and so what the message's sender waits for.
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
    # Each channel is its own group, which is what this warning advises (ProcessGroupNCCL.cpp).
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")


def _initialize(
    backend: str, identity: WorkerIdentity, *, timeout: timedelta, device: torch.device
) -> tuple[NodeName, ...]:
    """Join the group of all ranks, and return the machines that they are on."""
    store = _own_store(identity, timeout=timeout)
    announce_node(store, identity)
    if backend == "nccl" and identity.is_of_scheduler:
        check_own_cards(store, identity, card_name(device))
    dist.init_process_group(
        backend,
        store=store,
        rank=identity.rank,
        world_size=identity.world_size,
        timeout=timeout,
        device_id=device if backend == "nccl" else None,
    )
    return read_nodes(store, identity)


def _tell_deepspeed(backend: str) -> None:
    """Make DeepSpeed use the groups; until then its configuration assumes a world of one rank."""
    import deepspeed

    if backend == "gloo":
        skip_shared_memory_build()
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)


def _own_store(identity: WorkerIdentity, *, timeout: timedelta) -> Store:
    """Return a key-value store that all ranks share that no earlier run of these processes has written to."""
    rank, size = identity.rank, identity.world_size
    if size == 1:
        return HashStore()
    store = _launcher_store(f"{identity.master_addr}:{identity.master_port}", rank=rank, size=size, timeout=timeout)
    # Keys left there by an earlier run's groups are addresses of closed sockets. Each rank counts for
    # itself: all ranks join equally often.
    return PrefixStore(f"run-{store.add(f'joined-by-{rank}', 1)}", store)


@functools.cache
def _launcher_store(address: str, *, rank: int, size: int, timeout: timedelta) -> Store:
    """Connect to the store at the launcher's address, once per process.

    If the store ended with a run, a fast rank could still reach its server at the start of the next run.

    Source:
        torch distributed/rendezvous.py _env_rendezvous_handler.
    """
    store: Store
    store, _, _ = next(rendezvous(f"env://?rank={rank}&world_size={size}", timeout=timeout))
    store.set_timeout(timeout)
    return store
