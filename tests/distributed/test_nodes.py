"""Errors of Gloo and NCCL about a broken connection name the machine at its other end."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore

from toolkit.distributed.nodes import NodeName, announce_node, lost_node, naming_lost_nodes, own_addresses, read_nodes
from toolkit.errors import DataError, RunError
from toolkit.launch.identity import WorkerIdentity

NODES = (
    NodeName(host="gpu07", addresses=("10.0.0.7", "fd00::7"), first_rank=0, num_ranks=4),
    NodeName(host="gpu08", addresses=("10.0.0.8", "192.168.1.8"), first_rank=4, num_ranks=4),
    NodeName(host="gpu11", addresses=("10.0.0.11",), first_rank=8, num_ranks=1),
)
GLOO = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] "


@pytest.mark.parametrize(
    ("message", "named"),
    [
        (
            f"{GLOO}Read error [10.0.0.8]:5266: Connection reset by peer. This is typically",
            "gpu08 (ranks 4 to 7) at 10.0.0.8",
        ),
        (f"{GLOO}Connection closed by peer [10.0.0.11]:38812", "gpu11 (rank 8) at 10.0.0.11"),
        (f"{GLOO}writev [fd00::7]:1: Broken pipe", "gpu07 (ranks 0 to 3) at fd00::7"),
        ("ncclRemoteError: ... Last error:\nsocketProgress: Connection closed by remote peer gpu08<49210>", "gpu08"),
        ("NCCL WARN NET/IB : Got completion from peer 10.0.0.7<41033> with status=12", "gpu07"),
        ("socketProgress: Connection closed by remote peer 10.9.9.9<49210>", None),
        ("the tensor on 10.0.0.8 has another shape", None),
        ("mat1 and mat2 shapes cannot be multiplied ([10.0.0.8]:1)", None),
    ],
)
def test_the_lost_machine_is_named(message, named):
    found = lost_node(message, NODES)
    assert (found is None) == (named is None)
    if found is not None:
        assert named in str(found)
        assert found.codes == ("NODE_LOST",)


def test_other_errors_stay():
    with pytest.raises(ValueError, match="not a connection"), naming_lost_nodes(NODES):
        raise ValueError("not a connection")
    ours = DataError.of(code="DATA_EMPTY", message="Connection closed by peer [10.0.0.8]:1", fix="none")
    with pytest.raises(DataError), naming_lost_nodes(NODES):
        raise ours
    with pytest.raises(RunError, match="gpu08"), naming_lost_nodes(NODES):
        raise RuntimeError("Connection closed by peer [10.0.0.8]:1")


class Appending:
    """A store of one process with `append`, which torch's own of one process lacks."""

    def __init__(self) -> None:
        self.store, self.text = HashStore(), ""

    def append(self, key, text):
        self.text += text
        self.store.set(key, self.text)

    def __getattr__(self, name):
        return getattr(self.store, name)


def test_one_rank_of_each_machine_announces_it():
    store = Appending()
    ranks = [
        WorkerIdentity(rank=rank, local_rank=rank % 2, world_size=4, local_world_size=2, master_addr="a", master_port=1)
        for rank in range(4)
    ]
    for rank in ranks:
        announce_node(store, rank)
    nodes = read_nodes(store, ranks[3])
    assert [(node.first_rank, node.num_ranks) for node in nodes] == [(0, 2), (2, 2)]
    assert nodes[0].addresses == tuple(own_addresses())
    alone = WorkerIdentity(rank=0, local_rank=0, world_size=2, local_world_size=2)
    assert read_nodes(store, alone) == ()
