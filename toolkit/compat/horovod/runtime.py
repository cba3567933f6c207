"""This process as a rank: `init` and `shutdown`, its place among the others, and process sets."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from toolkit.compat.horovod.coordinator import Coordinator, connect
from toolkit.compat.horovod.engine import Engine
from toolkit.compat.horovod.errors import HorovodValueError, NotBuiltError, not_built, refuse_value
from toolkit.compat.horovod.messages import Request
from toolkit.compat.horovod.variables import Pace, warn_without_effect
from toolkit.launch.identity import WorkerIdentity, rank_from_environment

# Collectives time out after this long once all ranks have called them.
_TIMEOUT = timedelta(minutes=30)
# How long rank 0 waits at its end for ranks that still do their last operation.
_END_SECONDS = 5.0
_ALL_BACKENDS = "cpu:gloo,cuda:nccl"
_THIS_HOST = ("127.0.0.1", "localhost", "::1")


@final
class ProcessSet:
    """Ranks that do operations among themselves.

    Args:
        ranks: Their global ranks; pass the set to `init` or `add_process_set` on all ranks before it is used.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.process_set_id: int | None = None
        self.ranks: list[int] | None = sorted(set(ranks))

    def size(self) -> int:
        """Return the number of ranks in the set."""
        return len(self._members())

    def rank(self) -> int:
        """Return this process's rank within the set, or -1 outside of it."""
        members = self._members()
        return members.index(rank()) if rank() in members else -1

    def included(self) -> bool:
        """Return whether this process belongs to the set."""
        return rank() in self._members()

    def _members(self) -> list[int]:
        _running()
        if self.process_set_id is None or self.ranks is None:
            refuse_value(
                "process_set",
                f"{self} is not a process set of the ranks that run",
                "Pass it to init(process_sets=[…]) or add_process_set on all ranks, and call init()",
            )
        return self.ranks

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


global_process_set = ProcessSet([])


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """The place of one process among all of them.

    Args:
        nodes: Ranks of each machine, in the order of their first rank.
    """

    rank: int
    local_rank: int
    nodes: tuple[tuple[int, ...], ...]

    @property
    def node(self) -> tuple[int, ...]:
        """Ranks of this machine."""
        return next(ranks for ranks in self.nodes if self.rank in ranks)

    @property
    def across(self) -> list[int]:
        """Indices of the machines that have a rank of this local rank."""
        return [index for index, ranks in enumerate(self.nodes) if len(ranks) > self.local_rank]


@dataclass(slots=True, kw_only=True)
class _Process:
    """What a process has between `init` and `shutdown`."""

    membership: Membership
    engine: Engine
    coordinator: Coordinator | None
    owns_world: bool
    sets: list[ProcessSet]


_process: _Process | None = None


def init(comm: Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Join the other ranks, as the launcher's variables describe them; without a launcher, be the only one.

    Tensors on cards are sent by NCCL, others by gloo. A card of the local rank's number becomes torch's current one.

    Args:
        comm: Not built: a communicator or a list of ranks other than all.
        process_sets: Process sets to add. `"dynamic"` is accepted, since sets may be added at any time.

    Raises:
        NotBuiltError: HOROVOD_NOT_BUILT, for `comm`.
        RunError: LAUNCH_ENV, if the launcher's variables are incomplete.
    """
    global _process
    if _process is not None:
        return
    found = rank_from_environment(os.environ)
    identity = found or WorkerIdentity(rank=0, local_rank=0, world_size=1)
    if comm is not None and not (isinstance(comm, list | tuple) and list(comm) == list(range(identity.world_size))):
        raise NotBuiltError(not_built("init(comm=…)", "Leave it out, and pass ProcessSet objects as process_sets"))
    if found is not None:
        for name, value in found.as_environment().items():
            os.environ.setdefault(name, value)  # torch's rendezvous reads them, and so do scripts
    device = _device(identity)
    owns_world = not dist.is_initialized()
    if owns_world:
        dist.init_process_group(
            _ALL_BACKENDS if device is not None else "gloo",
            store=_store(identity),
            rank=identity.rank,
            world_size=identity.world_size,
            timeout=_TIMEOUT,
        )
    membership = _membership(identity)
    engine, coordinator = _engine(identity, device)
    global_process_set.process_set_id, global_process_set.ranks = 0, list(range(identity.world_size))
    _process = _Process(
        membership=membership, engine=engine, coordinator=coordinator, owns_world=owns_world, sets=[global_process_set]
    )
    atexit.register(shutdown)
    if not isinstance(process_sets, str):
        for process_set in process_sets or ():
            add_process_set(process_set)


def shutdown() -> None:
    """Leave the other ranks after the operations that all have called; what needs this one later fails on them."""
    global _process
    if _process is None:
        return
    left, _process = _process, None
    atexit.unregister(shutdown)
    for process_set in left.sets:
        process_set.process_set_id = None
    ended = left.engine.leave()
    if left.coordinator is not None:
        left.coordinator.join(_END_SECONDS)
    if left.owns_world and ended and dist.is_initialized():
        with contextlib.suppress(RuntimeError):  # a rank that died has taken the group with it
            dist.destroy_process_group()


def _device(identity: WorkerIdentity) -> torch.device | None:
    if not torch.cuda.is_available():
        return None
    if (index := identity.card_index(torch.cuda.device_count())) is not None:  # else the script chooses
        torch.cuda.set_device(index)
    return torch.device("cuda", torch.cuda.current_device())


def _store(identity: WorkerIdentity) -> Store:
    """Return a store that no earlier `init` of these processes has written to."""
    if identity.world_size == 1:
        return HashStore()
    store = _launcher_store(identity.rank, identity.world_size)
    return PrefixStore(f"horovod-{store.add(f'horovod-joined-by-{identity.rank}', 1)}", store)


@functools.cache
def _launcher_store(rank: int, size: int) -> Store:
    """Connect to the store at the launcher's address, once a process: a second server could not take its port."""
    store: Store
    store, _, _ = next(rendezvous(f"env://?rank={rank}&world_size={size}", timeout=_TIMEOUT))
    return store


def _membership(identity: WorkerIdentity) -> Membership:
    """Ask all ranks on which machine they are."""
    own = os.environ.get("GROUP_RANK") or os.environ.get("SLURM_NODEID") or socket.gethostname()
    everyone: list[Any] = [None] * identity.world_size
    dist.all_gather_object(everyone, own)
    nodes: dict[str, list[int]] = {}
    for rank_there, name in enumerate(everyone):
        nodes.setdefault(name, []).append(rank_there)
    return Membership(
        rank=identity.rank, local_rank=identity.local_rank, nodes=tuple(tuple(ranks) for ranks in nodes.values())
    )


def _engine(identity: WorkerIdentity, device: torch.device | None) -> tuple[Engine, Coordinator | None]:
    """Start the negotiation, on rank 0, and connect to it."""
    host = identity.master_addr or "127.0.0.1"
    coordinator = None
    address: list[Any] = [None]
    if identity.rank == 0:
        pace = Pace.from_environment()
        warn_without_effect()
        coordinator = Coordinator(identity.world_size, pace=pace, on_this_host=host in _THIS_HOST)
        connection = coordinator.start()
        address = [coordinator.address]
    dist.broadcast_object_list(address, src=0)
    if coordinator is None:
        connection = connect(host, address[0], identity.rank)
    group = _group(device)
    engine = Engine(rank=identity.rank, size=identity.world_size, connection=connection, group=group, device=device)
    return engine, coordinator


def _group(device: torch.device | None) -> dist.ProcessGroup:
    """Return a group of all ranks for tensors of the host and of cards; one that the script made may lack a backend."""
    world = dist.group.WORLD
    assert world is not None
    backends = dist.get_backend_config(world)
    if "gloo" in backends and (device is None or "nccl" in backends):
        return world
    group: dist.ProcessGroup = dist.new_group(backend=_ALL_BACKENDS if device is not None else "gloo")
    return group


def _running() -> _Process:
    if _process is None:
        raise HorovodValueError.of(
            code="HOROVOD_NOT_INITIALIZED",
            message="a Horovod function was called before init() or after shutdown()",
            fix="Call hvd.init() first",
        )
    return _process


def engine() -> Engine:
    """Return this process's engine.

    Raises:
        HorovodValueError: HOROVOD_NOT_INITIALIZED.
    """
    return _running().engine


def is_initialized() -> bool:
    """Return whether `init` has been called, and `shutdown` not since."""
    return _process is not None


def rank() -> int:
    """Return this process's rank among all."""
    return _running().membership.rank


def size() -> int:
    """Return the number of ranks."""
    return sum(map(len, _running().membership.nodes))


def local_rank() -> int:
    """Return this process's rank on its machine."""
    return _running().membership.local_rank


def local_size() -> int:
    """Return the number of ranks on this machine."""
    return len(_running().membership.node)


def cross_rank() -> int:
    """Return the index of this machine among those that have a rank of this local rank."""
    membership = _running().membership
    return membership.across.index(membership.nodes.index(membership.node))


def cross_size() -> int:
    """Return the number of machines that have a rank of this local rank."""
    return len(_running().membership.across)


def is_homogeneous() -> bool:
    """Return whether all machines have as many ranks."""
    return len({len(ranks) for ranks in _running().membership.nodes}) == 1


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Add a process set; all ranks call this with the same ranks in the same order of calls.

    Raises:
        HorovodValueError: HOROVOD_ARGUMENT, if the set has no rank, one that does not exist, or is there already.
        HorovodInternalError: HOROVOD_MISMATCH, if the ranks disagree.
    """
    running = _running()
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    ranks = added.ranks or []
    if not ranks or not set(ranks) <= set(range(size())):
        refuse_value("process_set", f"ranks={ranks} is not a list of ranks", f"Name ranks from 0 to {size() - 1}")
    if any(other.ranks == ranks for other in running.sets):
        refuse_value("process_set", f"ranks={ranks} is a process set already", "Use the one that was added before")
    request = Request(kind="add_process_set", name=running.engine.next_name("process_set"), ranks=tuple(ranks))
    added.process_set_id = running.engine.submit(request).wait()
    running.sets.append(added)
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set, on all ranks; return whether it was one, other than that of all ranks."""
    running = _running()
    if process_set is global_process_set or process_set not in running.sets:
        return False
    assert process_set.process_set_id is not None
    name = running.engine.next_name("process_set")
    running.engine.submit(Request(kind="remove_process_set", name=name, root=process_set.process_set_id)).wait()
    running.sets.remove(process_set)
    process_set.process_set_id = None
    return True


def get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """Return the ranks of each process set by its number."""
    return {
        one.process_set_id: list(one.ranks) for one in _running().sets if one.process_set_id is not None and one.ranks
    }
