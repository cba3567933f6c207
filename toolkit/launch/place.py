"""What this process is to a job: one of its ranks, the starter of one node's ranks, or the starter of all of them.

The same command runs in each of these places. What the variables say is compared with the job's nodes and cards first, so that
a run of another size ends before anything is imported or written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from toolkit.errors import PlanError, Problem, RunError, raise_all
from toolkit.launch.identity import (
    LAUNCHER_NAMES,
    NUM_NODES,
    Launcher,
    WorkerIdentity,
    detect_launcher,
    rank_from_environment,
)
from toolkit.launch.rendezvous import JOBS_PORT, first_host, port_of_job, port_that_is_set
from toolkit.units import whole_number

# These start one process a rank or one a node, as they are asked to; the others start one a rank.
_EITHER = ("slurm", "openmpi", "mpich", "mvapich")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """This process starts the ranks of one node of several.

    Args:
        node: Index of the node.
        num_nodes: Number of nodes of the run.
        master_addr: Host of rank 0.
        master_port: TCP port on it.
        launcher: What started this process.
        variables: Names of the variables that were read.
    """

    node: int
    num_nodes: int
    master_addr: str
    master_port: int
    launcher: Launcher
    variables: tuple[str, ...] = field(default=(), compare=False)

    def describe(self) -> str:
        """Return in one line what was found, and by which variables."""
        by = LAUNCHER_NAMES[self.launcher]
        where = f"rendezvous at {self.master_addr}:{self.master_port}"
        return f"node {self.node} of {self.num_nodes}, {where}; found by {', '.join(self.variables)} of {by}"


def find_place(
    env: Mapping[str, str], *, nodes: int, gpus_per_node: int, master_port: int | None = None
) -> WorkerIdentity | Node | None:
    """Return what this process is to a job: a rank, the starter of a node's ranks, or None where it starts all of them.

    Args:
        env: Environment variables of this process.
        nodes: Nodes of the job.
        gpus_per_node: Ranks of each node.
        master_port: The job's own port, if it names one.

    Raises:
        RunError: LAUNCH_ENV, for variables that are incomplete or contradict each other.
        PlanError: WORLD_SIZE, for another number of processes or nodes than the job has.
    """
    if NUM_NODES in env and not {"RANK", "LOCAL_RANK"} & set(env):
        return _by_hosts(env, nodes=nodes, gpus_per_node=gpus_per_node, master_port=master_port)
    launcher = detect_launcher(env)
    if launcher is None and "SKYPILOT_NODE_RANK" in env:
        return _skypilot(env, nodes=nodes, gpus_per_node=gpus_per_node, master_port=master_port)
    if launcher is None and nodes > 1 and "NODE_RANK" in env and not {"RANK", "LOCAL_RANK"} & set(env):
        return _by_variables(env, nodes=nodes, gpus_per_node=gpus_per_node, master_port=master_port)
    identity = rank_from_environment(env, master_port=master_port)
    if identity is None:
        return None
    size = identity.world_size
    if launcher in _EITHER and "RANK" not in env and gpus_per_node > 1 and size == nodes:
        return _one_process_a_node(identity, launcher, nodes=nodes)
    if size != nodes * gpus_per_node:
        raise PlanError(_wrong_size(identity, nodes=nodes, gpus_per_node=gpus_per_node))
    return identity


def place_without_job(env: Mapping[str, str], *, num_ranks: int) -> Node | None:
    """Return this machine's place in a run that no job describes, whose other nodes were started with it; None for one machine.

    Args:
        env: Environment variables of this process.
        num_ranks: Ranks of each node.

    Raises:
        RunError: LAUNCH_ENV.
    """
    nodes = _number_of_nodes(env)
    return None if nodes == 1 else _by_variables(env, nodes=nodes, gpus_per_node=num_ranks, master_port=None)


def _number_of_nodes(env: Mapping[str, str]) -> int:
    text = env.get(NUM_NODES, "1")
    number = whole_number(text)
    if not number:
        raise RunError.of(
            code="LAUNCH_ENV",
            key=NUM_NODES,
            message=f"{NUM_NODES}={text[:80]!r} is not a number of nodes, 1 or more",
            fix=f"Unset it: `--hosts` sets it on each node; or set {NUM_NODES}, NODE_RANK and MASTER_ADDR",
        )
    return number


def _by_hosts(env: Mapping[str, str], *, nodes: int, gpus_per_node: int, master_port: int | None) -> Node | None:
    """Read the place that `--hosts` has told this node: nothing else that is set there counts."""
    told = _number_of_nodes(env)
    if told != nodes:
        raise PlanError.of(
            code="WORLD_SIZE",
            key="cluster.nodes",
            message=f"{NUM_NODES}={told}, the plan has {nodes} nodes",
            fix=f"Set cluster.nodes={told}, or unset {NUM_NODES}",
        )
    if nodes == 1:
        return None
    return _by_variables(env, nodes=nodes, gpus_per_node=gpus_per_node, master_port=master_port)


def _wrong_size(identity: WorkerIdentity, *, nodes: int, gpus_per_node: int) -> Problem:
    world, size = nodes * gpus_per_node, identity.world_size
    started = f"the launcher started {size} process{'es' if size > 1 else ''}"
    either = ""
    if identity.launcher in _EITHER and gpus_per_node > 1:
        either = f", or one process a node, {nodes}"
    return Problem(
        code="WORLD_SIZE",
        key="cluster.gpus_per_node",
        message=f"{started} ({', '.join(identity.variables[:3])} of {LAUNCHER_NAMES[identity.launcher or 'variables']}), "
        f"the plan has {world} ranks",
        fix=f"Start {world} processes (`toolkit train`, torchrun, deepspeed or accelerate launch){either}; or change "
        "cluster.gpus_per_node and cluster.nodes",
    )


def _one_process_a_node(identity: WorkerIdentity, launcher: Launcher, *, nodes: int) -> Node | None:
    """Read the place of the one process that srun or mpirun has started on each node."""
    if nodes == 1:
        return None  # the only one: it starts all ranks, as without a launcher
    if identity.local_rank or identity.local_world_size not in (None, 1):
        raise PlanError.of(
            code="WORLD_SIZE",
            key="cluster.nodes",
            message=f"the launcher started {identity.local_world_size or 'several'} processes on a node, of {nodes} for "
            f"{nodes} nodes: one process starts the ranks of a node",
            fix="Start one process a node (srun --ntasks-per-node=1, mpirun -N 1), or one a rank",
        )
    assert identity.master_addr is not None
    assert identity.master_port is not None
    return Node(
        node=identity.rank,
        num_nodes=nodes,
        master_addr=identity.master_addr,
        master_port=identity.master_port,
        launcher=launcher,
        variables=identity.variables,
    )


def _skypilot(env: Mapping[str, str], *, nodes: int, gpus_per_node: int, master_port: int | None) -> Node | None:
    """Read SkyPilot's variables: it runs a task's command once on each node.

    Source:
        SkyPilot documentation, "Distributed Multi-Node Jobs" and "Environment variables".
    """
    ips = env.get("SKYPILOT_NODE_IPS", "").split()
    text = env["SKYPILOT_NODE_RANK"]
    rank = whole_number(text)
    found = []
    if rank is None or rank >= max(1, len(ips)):
        message = (
            f"SKYPILOT_NODE_RANK={text[:80]!r} is not the index of one of the {len(ips)} nodes of SKYPILOT_NODE_IPS"
        )
        fix = "Run the command in the task's `run:` section, where SkyPilot sets both"
        raise RunError(Problem(code="LAUNCH_ENV", key="SKYPILOT_NODE_RANK", message=message, fix=fix))
    if len(ips) != nodes:
        found.append(
            (f"SKYPILOT_NODE_IPS lists {len(ips)} nodes, the plan has {nodes}", "cluster.nodes", f"nodes={len(ips)}")
        )
    cards = whole_number(env.get("SKYPILOT_NUM_GPUS_PER_NODE"))
    if cards and cards < gpus_per_node:
        message = f"SKYPILOT_NUM_GPUS_PER_NODE={cards}, the plan has {gpus_per_node} ranks a node"
        found.append((message, "cluster.gpus_per_node", f"gpus_per_node={cards}"))
    raise_all(
        PlanError,
        (
            Problem(
                code="WORLD_SIZE", key=key, message=message, fix=f"Set cluster.{value}, or change the task's resources"
            )
            for message, key, value in found
        ),
    )
    if nodes == 1:
        return None
    port, source = (master_port, JOBS_PORT) if master_port else port_of_job(env, "skypilot")
    return Node(
        node=rank,
        num_nodes=nodes,
        master_addr=ips[0],
        master_port=port,
        launcher="skypilot",
        variables=tuple(name for name in ("SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS", source) if name),
    )


def _by_variables(env: Mapping[str, str], *, nodes: int, gpus_per_node: int, master_port: int | None) -> Node:
    """Read NODE_RANK, MASTER_ADDR and MASTER_PORT, as clouds and the emitted commands set them for each node."""
    text = env.get("NODE_RANK", "")
    rank = whole_number(text)
    addr, source = env.get("MASTER_ADDR"), "MASTER_ADDR"
    if not addr:
        addr, source = first_host(env, None, on_one_machine=False)
    found = []
    if not text:
        found.append(("NODE_RANK", f"NODE_RANK is not set, for nodes={nodes}: nothing says which of them this is"))
    elif rank is None or rank >= nodes:
        found.append(("NODE_RANK", f"NODE_RANK={text[:80]!r} is not one of 0 to {nodes - 1}, for nodes={nodes}"))
    if not addr:
        found.append(("MASTER_ADDR", f"MASTER_ADDR is not set, for nodes={nodes}: they cannot find each other"))
    port = None
    try:
        port = port_that_is_set(env)
    except RunError as error:
        found += [(str(problem.key), problem.message) for problem in error.problems]
    size = env.get("WORLD_SIZE")
    if size not in (None, str(nodes * gpus_per_node), str(nodes)):  # some clouds count ranks there, others nodes
        found.append(
            ("WORLD_SIZE", f"WORLD_SIZE={size[:80]}, the plan has {nodes * gpus_per_node} ranks on {nodes} nodes")
        )
    fix = f"Set NODE_RANK to 0 on the first node, up to {nodes - 1} on the last, and MASTER_ADDR to the first node's address"
    raise_all(RunError, (Problem(code="LAUNCH_ENV", key=key, message=message, fix=fix) for key, message in found))
    assert addr is not None
    assert rank is not None
    return Node(
        node=rank,
        num_nodes=nodes,
        master_addr=addr,
        master_port=port or master_port or port_of_job(env, None)[0],
        launcher="variables",
        variables=("NODE_RANK", source, *(["MASTER_PORT"] if port else [])),
    )
