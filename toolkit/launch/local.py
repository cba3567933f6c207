"""Launching of a plan's processes on this machine: all of them, or those of one node of several."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from toolkit.errors import RunError, raise_all
from toolkit.launch.devices import too_few_cards
from toolkit.launch.environment import Backend, worker_environment
from toolkit.launch.interfaces import GLOO_VARIABLE, check_is_here, interface_towards
from toolkit.launch.nvme import check_nvme, nvme_folder_of
from toolkit.launch.outcome import RunOutcome, rank_name
from toolkit.launch.place import Node
from toolkit.launch.ports import check_port, free_port
from toolkit.launch.ram import too_little_memory
from toolkit.launch.supervisor import GRACE_SECONDS, WHEN_ASKED, TrainerRanks, supervise
from toolkit.planning.plan import Plan

LOGS = "logs"


def launch_local(
    plan: Plan,
    argv: Sequence[str],
    *,
    log_dir: Path,
    node: Node | None = None,
    extra_environment: Mapping[str, str] | None = None,
    when_asked: str = WHEN_ASKED,
    grace_seconds: float = GRACE_SECONDS,
    trainer: TrainerRanks | None = None,
) -> RunOutcome:
    """Run one process per rank of this machine, in the environment that the plan needs, until all have ended.

    Args:
        plan: Resolved plan; sets the number of ranks, the backend and the port.
        argv: Command line of a worker.
        log_dir: Folder of logs and error files.
        node: This machine's place among the plan's nodes; None for a plan of one node.
        extra_environment: Variables in addition to the worker's own.
        when_asked: What a worker does at Ctrl-C, as `supervise` prints it.
        grace_seconds: Seconds between SIGTERM and SIGKILL after a rank has failed.
        trainer: What the workers do if they are those of `toolkit train`.

    Raises:
        RunError: LAUNCH_NODES for a plan of several nodes; LAUNCH_CARDS; PORT_IN_USE; NVME_FOLDER, NVME_DIRECT, NVME_SPACE,
            NVME_MEMLOCK, NVME_IN_USE.
    """
    check_launchable(plan, node)
    cluster = plan.job.cluster
    with nvme_folder_of(plan):
        return launch_ranks(
            argv,
            num_ranks=cluster.gpus_per_node,
            node=node,
            backend=plan.gpu.backend,
            port=cluster.master_port,
            log_dir=log_dir,
            extra_environment=extra_environment,
            when_asked=when_asked,
            grace_seconds=grace_seconds,
            name_of=plan.grid.describe_rank,
            trainer=trainer,
        )


def launch_ranks(
    argv: Sequence[str],
    *,
    num_ranks: int,
    backend: Backend,
    log_dir: Path,
    node: Node | None = None,
    port: int | None = None,
    extra_environment: Mapping[str, str] | None = None,
    when_asked: str = WHEN_ASKED,
    grace_seconds: float = GRACE_SECONDS,
    trainer: TrainerRanks | None = None,
    name_of: Callable[[int], str] = rank_name,
) -> RunOutcome:
    """Run one process per rank on this machine until all have ended.

    Args:
        argv: Command line of a worker.
        num_ranks: Number of ranks to start here; each node has as many.
        backend: `nccl` or `gloo`.
        log_dir: Folder of logs and error files.
        node: This machine's place among several; None where it has all ranks.
        port: TCP port of the rendezvous of a run on this machine; a free one when left out.
        extra_environment: Variables in addition to the worker's own.
        when_asked: What a worker does at Ctrl-C, as `supervise` prints it.
        grace_seconds: Seconds between SIGTERM and SIGKILL after a rank has failed.
        trainer: What the workers do if they are those of `toolkit train`.
        name_of: Function that names a rank in messages.

    Raises:
        RunError: WORKER_START, LOG_DIR, MASTER_ADDR.
    """
    first, num_nodes = (0, 1) if node is None else (node.node * num_ranks, node.num_nodes)
    address = ("127.0.0.1", port or free_port()) if node is None else (node.master_addr, node.master_port)
    network = (
        {} if node is None or GLOO_VARIABLE in os.environ else {GLOO_VARIABLE: interface_towards(node.master_addr)}
    )
    if node is not None and node.node == 0:
        check_is_here(node.master_addr, node.variables)
    extra = {name: value for name, value in network.items() if value} | dict(extra_environment or {})

    def environment(rank: int) -> dict[str, str]:
        made = worker_environment(
            base=os.environ,
            rank=rank,
            local_rank=rank - first,
            world_size=num_ranks * num_nodes,
            local_world_size=num_ranks,
            master_addr=address[0],
            master_port=address[1],
            backend=backend,
            cpu_threads=None,
        )
        return made | extra

    return supervise(
        argv,
        ranks=range(first, first + num_ranks),
        env_for_rank=environment,
        log_dir=log_dir,
        grace_seconds=grace_seconds,
        when_asked=when_asked,
        name_of=name_of,
        trainer=trainer,
    )


def check_launchable(plan: Plan, node: Node | None = None) -> None:
    """Check what can be known before anything is written: the nodes, their GPUs, a free port, a disk to swap to.

    Raises:
        RunError: LAUNCH_NODES, LAUNCH_CARDS, PORT_IN_USE, HOST_MEMORY, NVME_FOLDER, NVME_DIRECT, NVME_SPACE, NVME_MEMLOCK.
    """
    check_nodes(plan, node)
    raise_all(RunError, too_few_cards(plan))
    check_machine(plan, node)


def check_nodes(plan: Plan, node: Node | None = None) -> None:
    """Refuse a plan of several nodes where nothing says which of them this machine is.

    Raises:
        RunError: LAUNCH_NODES.
    """
    cluster = plan.job.cluster
    if cluster.nodes > 1 and node is None:
        raise RunError.of(
            code="LAUNCH_NODES",
            key="cluster.nodes",
            message=f"nodes={cluster.nodes}: no variable says which of them this machine is",
            fix="Name them with `--hosts HOST1,HOST2` to start all of them from here by ssh; or start the same command on each node, "
            "with srun, mpirun or torchrun, or with NODE_RANK and MASTER_ADDR set; `toolkit emit` writes such files",
        )


def check_machine(plan: Plan, node: Node | None = None) -> None:
    """Check that this machine's port, disk and RAM are free for a plan; the first node's has the port.

    Raises:
        RunError: PORT_IN_USE, HOST_MEMORY, NVME_FOLDER, NVME_DIRECT, NVME_SPACE, NVME_MEMLOCK.
    """
    if plan.job.cluster.master_port is not None and (node is None or node.node == 0):
        check_port(plan.job.cluster.master_port)
    raise_all(RunError, too_little_memory(plan))
    check_nvme(plan)
