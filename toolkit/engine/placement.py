"""Ranks near their cards: threads on the processors, and memory from the node, to which the card is attached."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from toolkit.distributed.world import World
from toolkit.errors import RunError
from toolkit.launch.numa import Binding, bind, node_of_card, node_processors, restriction
from toolkit.launch.ram import too_little_memory
from toolkit.planning.plan import Plan
from toolkit.topology.table import name_ranks

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where this rank runs.

    Args:
        num_sharing: Ranks of this machine whose processors are among this rank's, itself included.
        binding: The node to which it is bound; None if it is not.
    """

    num_sharing: int
    binding: Binding | None = None

    def release(self) -> None:
        """Let this process run everywhere again."""
        if self.binding is not None:
            self.binding.release()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """What ranks tell each other: the machine, the processors that they use, the node to which they are bound or why they are not."""

    host: str
    processors: frozenset[int]
    node: int | None
    reason: str


def place_rank(plan: Plan, world: World) -> Placement:
    """Bind this rank to its card's NUMA node, if the job uses host memory or asks for it; rank 0 says so in one line.

    Args:
        plan: Resolved plan.
        world: All ranks; they call this together.

    Collectives:
        Two gathers of objects, where the job uses host memory or asks for it.

    Raises:
        RunError: HOST_MEMORY, before anything is allocated.
    """
    asked = plan.job.cluster.numa_binding
    if not asked and not uses_host_memory(plan):
        return Placement(num_sharing=min(world.size, plan.job.cluster.gpus_per_node))
    world.agree(_memory_error(plan) if world.local_rank == 0 else None)
    looks = asked is not False and world.device.type == "cuda"
    nodes = node_processors() if looks else {}
    node, reason = _near(nodes, card_address(world.device), os.environ) if looks else (None, "")
    binding = None if node is None else bind(node, nodes[node] & frozenset(os.sched_getaffinity(0)))
    own = _Place(host=socket.gethostname(), processors=frozenset(os.sched_getaffinity(0)), node=node, reason=reason)
    places: list[_Place] = [own]
    if world.size > 1:
        places = [own] * world.size
        dist.all_gather_object(places, own)
    if world.is_main and (said := describe(places, asked=bool(asked), num_nodes=len(nodes))):
        logger.warning(said)
    near = (place for place in places if place.host == own.host and place.processors & own.processors)
    return Placement(num_sharing=sum(1 for _ in near), binding=binding)


def uses_host_memory(plan: Plan) -> bool:
    """Return whether a job keeps states, weights or activations in host memory."""
    profile = plan.profile
    offloads = plan.job.parallel.strategy == "zero" and bool(profile.optimizer or profile.parameters)
    return offloads or profile.activations or plan.job.parallel.fsdp2_options.cpu_offload


def _memory_error(plan: Plan) -> RunError | None:
    problems = list(too_little_memory(plan))
    return RunError(*problems) if problems else None


def card_address(device: torch.device) -> str | None:
    """Return the PCI address of a card as NVML writes it; None where there is no such driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        return str(pynvml.nvmlDeviceGetPciInfo(handle).busId)
    except (pynvml.NVMLError, AttributeError):
        return None
    finally:
        pynvml.nvmlShutdown()


def _near(
    nodes: Mapping[int, frozenset[int]], address: str | None, environment: Mapping[str, str]
) -> tuple[int | None, str]:
    """Return the node to bind to; None and the reason where there is none."""
    if not nodes:
        return None, "the system names no NUMA nodes"
    if len(nodes) == 1:
        return None, "this machine has one NUMA node"
    if (why := restriction(environment)) is not None:
        return None, f"who started the process has chosen: {why}"
    node = None if address is None else node_of_card(address)
    if node is None:
        return None, "the system does not say to which node the card is attached"
    if not nodes.get(node, frozenset()) & frozenset(os.sched_getaffinity(0)):
        return None, f"the card is attached to node {node}, of whose processors the process may use none"
    return node, ""


def describe(places: Sequence[_Place], *, asked: bool, num_nodes: int) -> str:
    """Return one line about all ranks; empty where there is nothing to choose, unless the job asks for it.

    Args:
        places: What each rank has told.
        asked: Whether the job asks for the binding.
        num_nodes: NUMA nodes of this machine; 0 if the system names none, or nothing was looked for.
    """
    by_node: dict[int | str, list[int]] = {}
    for rank, place in enumerate(places):
        by_node.setdefault(place.reason if place.node is None else place.node, []).append(rank)
    said = [
        f"{name_ranks(ranks)} on NUMA node {key}"
        if isinstance(key, int)
        else f"{name_ranks(ranks)} not bound, since {key}"
        for key, ranks in by_node.items()
        if key != ""
    ]
    if not said or (num_nodes < 2 and not asked):
        return ""
    return f"Threads and memory near the cards: {'; '.join(said)}"
