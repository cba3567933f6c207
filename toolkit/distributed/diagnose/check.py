"""Verification of every group of a grid by real collectives: its members, their order, and that data moves."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from toolkit.distributed.device import own_card, rank_device
from toolkit.distributed.diagnose.blocked_ranks import Step
from toolkit.distributed.diagnose.collective_tests import OPERATIONS, GroupMember, Operation, bus_bandwidth
from toolkit.distributed.diagnose.hang_detection import OnHang, ProgressStore, watched
from toolkit.distributed.process_groups import join_group
from toolkit.errors import CheckError, PlanError, Problem, first_line
from toolkit.launch.environment import Backend
from toolkit.launch.identity import WorkerIdentity
from toolkit.topology.grid import KINDS, Grid
from toolkit.topology.table import format_ranks

_START = Step(kind="world", operation="start")
_REPORT = Step(kind="world", operation="report")
_LEAVE = Step(kind="world", operation="leave")
_JOIN, _BANDWIDTH = "join", "bandwidth"
# The hang detection must report before a process group's timeout, which knows only its own operation.
_GROUP_PATIENCE = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class KindReport:
    """The result of the check for one kind of group.

    Args:
        passed: Whether every operation gave the right result on every rank.
        seconds: Time of the slowest rank, from joining to the last operation, without the bandwidth test.
        bus_gb_per_second: Bandwidth of the slowest rank, all groups of the kind at once: 2 (n - 1) / n × bytes / time of an
            all-reduce of 64 MiB, in 10^9 bytes/s, which is comparable across group sizes; None on CPU.
    """

    kind: str
    passed: bool
    seconds: float
    bus_gb_per_second: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """The result of the check; `problems` are the GROUP_RESULT problems of all ranks.

    Between the clocks of the ranks' machines there are `clock_skew_seconds`, to some milliseconds.
    """

    backend: Backend
    kinds: tuple[KindReport, ...]
    operations: tuple[str, ...]
    problems: tuple[Problem, ...]
    clock_skew_seconds: float


def check_groups(
    grid: Grid,
    *,
    identity: WorkerIdentity,
    backend: Backend | None,
    timeout_seconds: float,
    on_hang: OnHang,
    operations: Sequence[Operation] = OPERATIONS,
) -> CheckReport | None:
    """Run this rank's part of the check of every group with more than one rank, and of the world.

    Args:
        grid: Grid of all ranks, each of which calls this; torch.distributed must not be initialised.
        identity: Identity of this rank; the ranks rendezvous at the environment's MASTER_ADDR and MASTER_PORT.
        backend: Backend, the same on all ranks; None selects `nccl` if each rank has a GPU, else `gloo`.
        timeout_seconds: Seconds without progress of any rank, after which all ranks end with exit code 1.
        on_hang: Called on a rank then, before it ends.
        operations: Operations to verify, in order; tests leave one out on one rank.

    Returns:
        The report on rank 0, None on the others.

    Raises:
        CheckError: GROUP_HANG if the store cannot be reached; GROUP_OPERATION if an operation fails.
        PlanError: WORLD_SIZE, WORLD_NO_GPU.
    """
    _check_size(grid, identity)
    if backend is not None:
        rank_device(backend, identity)  # fail on a missing GPU before waiting for others
    store = _meet(identity.rank, timeout_seconds=timeout_seconds)
    board = ProgressStore(_second_connection(store), rank=identity.rank, grid=grid)
    with watched(board, grid, all_steps(grid), rank=identity.rank, timeout_seconds=timeout_seconds, on_hang=on_hang):
        with board.inside(_START):
            all_have = board.agree("cards", own_card(identity) is not None)
            backend = backend or ("nccl" if all_have else "gloo")
            device = rank_device(backend, identity)
            dist.init_process_group(
                backend,
                store=PrefixStore("groups", store),
                rank=identity.rank,
                world_size=grid.world_size,
                timeout=timedelta(seconds=_GROUP_PATIENCE * timeout_seconds),
                device_id=device if backend == "nccl" else None,
            )
        own = {kind: _prove_kind(grid, kind, identity.rank, device, board, operations) for kind in kinds_of(grid)}
        with board.inside(_REPORT):
            board.agree("clocks", True)  # all ranks go on from here within milliseconds
            clock = time.time()
            gathered = board.gather({"kinds": own, "clock": clock})
        with board.inside(_LEAVE):  # after all operations, and while rank 0 keeps the store
            dist.destroy_process_group()
    if identity.rank != 0:
        return None
    clocks = [each["clock"] for each in gathered]
    return _merge(
        backend, operations, [each["kinds"] for each in gathered], clock_skew_seconds=max(clocks) - min(clocks)
    )


def kinds_of(grid: Grid) -> tuple[str, ...]:
    """Return the kinds whose groups have more than one rank, and the world.

    >>> kinds_of(Grid(dp=2, tp=2))
    ('tp', 'dp', 'model', 'stage', 'dp-pp', 'world')
    """
    return tuple(kind for kind in KINDS if kind == "world" or grid.size(kind) > 1)


def all_steps(grid: Grid) -> tuple[Step, ...]:
    """Return every step that ranks record on the board, in execution order."""
    names = (_JOIN, *(operation.name for operation in OPERATIONS), _BANDWIDTH)
    steps = (Step(kind=kind, operation=name) for kind in kinds_of(grid) for name in names)
    return (_START, *steps, _REPORT, _LEAVE)


def _prove_kind(
    grid: Grid, kind: str, rank: int, device: torch.device, board: ProgressStore, operations: Sequence[Operation]
) -> dict[str, Any]:
    """Join this rank's group of a kind and run each operation; return a JSON object."""
    ranks = grid.group_of(rank, kind)
    started = time.monotonic()
    with board.inside(Step(kind=kind, operation=_JOIN)):
        group = join_group(grid, rank, kind)
    member = GroupMember(
        kind=kind, ranks=ranks, rank=rank, world_size=grid.world_size, group=group, device=device, board=board
    )
    problems = [problem for operation in operations for problem in _prove(operation, member)]
    seconds = time.monotonic() - started
    bandwidth = None
    if device.type == "cuda" and len(ranks) > 1:
        with board.inside(Step(kind=kind, operation=_BANDWIDTH)):
            bandwidth = bus_bandwidth(member)
    return {
        "seconds": seconds,
        "bus_gb_per_second": bandwidth,
        "problems": [problem.as_dict() for problem in problems],
    }


def _prove(operation: Operation, member: GroupMember) -> list[Problem]:
    where = f"{operation.name} over the {member.kind} group of ranks {format_ranks(member.ranks)}"
    with member.board.inside(Step(kind=member.kind, operation=operation.name)):
        try:
            got, expected = operation.run(member)
        except RuntimeError as error:  # torch raises it for NCCL and gloo errors too
            raise CheckError.of(
                code="GROUP_OPERATION",
                message=f"{where} failed on rank {member.rank}: {first_line(error)}",
                fix="Check the other ranks first: one that died makes its peers fail; NCCL_DEBUG=INFO shows more",
            ) from error
    if got == expected:
        return []
    return [
        Problem(
            code="GROUP_RESULT",
            message=f"{where} gave rank {member.rank} {_brief(got)}, not {_brief(expected)}",
            fix="Compare driver, NCCL and torch of these ranks' machines; with GPUs, NCCL_P2P_DISABLE=1 shows "
            "whether peer-to-peer transfers are at fault",
        )
    ]


def _brief(values: Sequence[int]) -> str:
    return f"[{', '.join(map(str, values[:8]))}{', …' if len(values) > 8 else ''}]"


def _check_size(grid: Grid, identity: WorkerIdentity) -> None:
    if identity.world_size != grid.world_size:
        raise PlanError.of(
            code="WORLD_SIZE",
            key="cluster.gpus_per_node",
            message=f"the launcher started {identity.world_size} process{'es' if identity.world_size > 1 else ''}, the grid "
            f"has {grid.world_size} ranks",
            fix=f"Start {grid.world_size} processes, or give sizes whose product is {identity.world_size}",
        )


def _meet(rank: int, *, timeout_seconds: float) -> Store:
    """Connect to the launcher's store without waiting for other ranks: the board shows which ones join.

    Source:
        torch distributed/rendezvous.py _env_rendezvous_handler; with an unknown world size, -1, it does not wait.
    """
    try:
        store, _, _ = next(rendezvous(f"env://?rank={rank}&world_size=-1", timeout=timedelta(seconds=timeout_seconds)))
    except dist.DistError as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise CheckError.of(
            code="GROUP_HANG",
            message=f"rank {rank} cannot reach the ranks' store at {address} within {timeout_seconds:g} s: rank 0 has "
            "not started there, or the network blocks the connection",
            fix="Check that rank 0's machine has this name and that its firewall accepts connections from the other "
            "machines",
        ) from error
    # A group that waits for a rank waits on the store; the hang detection must report before the store times out.
    store.set_timeout(timedelta(seconds=_GROUP_PATIENCE * timeout_seconds))
    return cast("Store", store)


def _second_connection(store: Any) -> Store:
    return cast("Store", store.clone())  # missing in torch's type stub of Store


def _merge(
    backend: Backend,
    operations: Sequence[Operation],
    reports: Sequence[Mapping[str, Mapping[str, Any]]],
    *,
    clock_skew_seconds: float,
) -> CheckReport:
    """Merge the ranks' reports; times are those of the slowest."""
    kinds = []
    for kind in reports[0]:
        found = [report[kind] for report in reports]
        speeds = [one["bus_gb_per_second"] for one in found if one["bus_gb_per_second"] is not None]
        seconds = max(one["seconds"] for one in found)
        passed = not any(one["problems"] for one in found)
        kinds.append(KindReport(kind=kind, passed=passed, seconds=seconds, bus_gb_per_second=min(speeds, default=None)))
    problems = [Problem(**problem) for report in reports for one in report.values() for problem in one["problems"]]
    return CheckReport(
        backend=backend,
        kinds=tuple(kinds),
        operations=(_JOIN, *(operation.name for operation in operations)),
        problems=tuple(problems),
        clock_skew_seconds=clock_skew_seconds,
    )
