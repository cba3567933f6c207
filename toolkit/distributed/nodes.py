"""The machines of a run by name, so that an error of a broken connection says which of them was lost.

Gloo and NCCL tell the address of the other end alone: `Connection closed by peer [10.0.0.7]:51234`.
"""

from __future__ import annotations

import ipaddress
import json
import re
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import psutil
from torch._C._distributed_c10d import Store

from toolkit.errors import RunError, ToolkitError
from toolkit.launch.identity import WorkerIdentity

# Ranks join within a moment of each other once all are there; names are not worth a longer wait.
_GATHER_SECONDS = 10.0
_KEY, _COUNT = "nodes", "nodes-ranks"
# gloo/transport/tcp/pair.cc; nccl src/misc/socket.cc and src/transport/net_ib.cc
_PEERS = (
    re.compile(
        r"(?:[Cc]onnection (?:closed|reset|refused|timed out)|(?:Read|Write) (?:error|timeout)|writev|recv)[^\[]*\[([0-9A-Fa-f:.]+)\]:\d+"
    ),
    re.compile(r"(?:peer|remote|to|from) ([0-9A-Za-z_.:-]+)<\d+>"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeName:
    """One machine of a run.

    Args:
        host: Its name.
        addresses: Its addresses, without the loopback's.
        first_rank: Rank with local rank 0.
        num_ranks: Number of ranks there.
    """

    host: str
    addresses: tuple[str, ...]
    first_rank: int
    num_ranks: int

    def describe(self) -> str:
        """Return its name and ranks; torchrun, mpirun and srun number the ranks of a node in a row unless told otherwise."""
        last = self.first_rank + self.num_ranks - 1
        return (
            f"{self.host} (rank {last})" if self.num_ranks == 1 else f"{self.host} (ranks {self.first_rank} to {last})"
        )


def announce_node(store: Store, identity: WorkerIdentity) -> None:
    """Write this machine's name to the ranks' store; one rank of each machine does, on a run of several."""
    if identity.spans_nodes and identity.local_world_size is not None and identity.local_rank == 0:
        entry = {
            "host": socket.gethostname(),
            "addresses": own_addresses(),
            "first_rank": identity.rank,
            "num_ranks": identity.local_world_size,
        }
        cast("Any", store).append(_KEY, json.dumps(entry) + "\n")  # missing in torch's type stub
        store.add(_COUNT, identity.local_world_size)


def read_nodes(store: Store, identity: WorkerIdentity) -> tuple[NodeName, ...]:
    """Return the machines that `announce_node` has told of; none for a run on one, or where a launcher does not say the local size."""
    if not identity.spans_nodes or identity.local_world_size is None:
        return ()
    deadline = time.monotonic() + _GATHER_SECONDS
    while store.add(_COUNT, 0) < identity.world_size:
        if time.monotonic() > deadline:
            return ()
        time.sleep(0.01)
    entries = [json.loads(line) for line in store.get(_KEY).decode().splitlines()]
    return tuple(NodeName(**{**entry, "addresses": tuple(entry["addresses"])}) for entry in entries)


def own_addresses() -> list[str]:
    """Return this machine's addresses, without the loopback's."""
    texts = [
        known.address.partition("%")[0]
        for addresses in psutil.net_if_addrs().values()
        for known in addresses
        if known.family in (socket.AF_INET, socket.AF_INET6)
    ]
    return [text for text in texts if not ipaddress.ip_address(text).is_loopback]


@contextmanager
def naming_lost_nodes(nodes: Sequence[NodeName]) -> Iterator[None]:
    """Turn an error of a broken connection into one that names the machine at its other end.

    Raises:
        RunError: NODE_LOST.
    """
    try:
        yield
    except ToolkitError:
        raise
    except Exception as error:
        lost = lost_node(str(error), nodes)
        if lost is None:
            raise
        raise lost from error


def lost_node(message: str, nodes: Sequence[NodeName]) -> RunError | None:
    """Return the error for a message of Gloo's or NCCL's about a broken connection; None for any other message."""
    peers = [match[1] for pattern in _PEERS for match in pattern.finditer(message)]
    for peer in peers:
        for node in nodes:
            if node.host != socket.gethostname() and (peer in node.addresses or peer == node.host):
                return RunError.of(
                    code="NODE_LOST",
                    message=f"the connection to {node.describe()} at {peer} broke: its processes have ended, or it cannot be reached",
                    fix="See the last output of that node; then go on from the last checkpoint, as `--resume auto` does",
                )
    return None
