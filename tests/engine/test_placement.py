"""Which jobs bind their ranks, and the one line that says where they are."""

from __future__ import annotations

import pytest

from toolkit.config.job import Job
from toolkit.engine import placement
from toolkit.engine.placement import _near, _Place, describe, uses_host_memory
from toolkit.planning.resolve import resolve

JOB = {"model": "llama-3.2-1b", "cluster": {"gpu": "h100-sxm-80gb"}}
NODES = {0: frozenset({0, 1}), 1: frozenset({2, 3})}


@pytest.mark.parametrize(
    ("parallel", "train", "uses"),
    [
        ({"zero_stage": 2}, {}, False),
        ({"zero_stage": 2, "offload": "optimizer-cpu"}, {}, True),
        ({"zero_stage": 3, "offload": "full-cpu"}, {}, True),
        ({"offload": "activations-cpu"}, {"gradient_checkpointing": True}, True),
        ({"strategy": "fsdp2", "fsdp2": {"cpu_offload": True}}, {}, True),
        ({"strategy": "ddp"}, {}, False),
    ],
)
def test_jobs_that_keep_something_in_host_memory_are_bound(parallel: dict, train: dict, uses: bool) -> None:
    assert uses_host_memory(resolve(Job.model_validate({**JOB, "parallel": parallel, "train": train}))) is uses


def place(node: int | None, reason: str = "", host: str = "a") -> _Place:
    return _Place(host=host, processors=frozenset(), node=node, reason=reason)


def test_one_line_says_where_the_ranks_are() -> None:
    said = describe([place(0), place(0), place(1), place(None, "of a reason")], asked=False, num_nodes=2)
    assert said == (
        "Threads and memory near the cards: ranks 0, 1 on NUMA node 0; rank 2 on NUMA node 1; rank 3 not bound, since of a reason"
    )
    one = [place(None, "this machine has one NUMA node")]
    assert describe(one, asked=False, num_nodes=1) == ""
    assert "one NUMA node" in describe(one, asked=True, num_nodes=1)
    assert describe([place(None)], asked=False, num_nodes=0) == ""
    unnamed = [place(None, "the system names no NUMA nodes")]
    assert "rank 0 not bound, since the system names no NUMA nodes" in describe(unnamed, asked=True, num_nodes=0)
    assert describe(unnamed, asked=False, num_nodes=0) == ""


def test_a_card_s_node_is_taken_where_the_process_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "restriction", lambda environment: environment.get("WHY"))
    monkeypatch.setattr(placement, "node_of_card", lambda address: {"x": 1, "y": 0}.get(address))
    monkeypatch.setattr(placement.os, "sched_getaffinity", lambda process: {2})
    assert _near(NODES, "x", {}) == (1, "")
    assert "node 0, of whose processors the process may use none" in _near(NODES, "y", {})[1]
    assert "does not say" in _near(NODES, "z", {})[1] == _near(NODES, None, {})[1]
    assert "has chosen: because" in _near(NODES, "x", {"WHY": "because"})[1]
    assert _near({0: NODES[0]}, "x", {})[0] is None
    assert _near({}, "x", {}) == (None, "the system names no NUMA nodes")
