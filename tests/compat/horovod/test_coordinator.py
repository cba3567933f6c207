"""The coordinator, talked to over its real connections: faults reach every rank, and a rank that leaves holds up no other."""

from __future__ import annotations

import io
import sys
import time
from multiprocessing.connection import Connection

import pytest
import torch

from toolkit.compat.horovod import coordinator
from toolkit.compat.horovod.coordinator import Coordinator, connect
from toolkit.compat.horovod.errors import HorovodInternalError
from toolkit.compat.horovod.messages import Request, TensorSpec
from toolkit.compat.horovod.variables import Pace
from toolkit.compat.horovod.wire import LEAVE, Book, Lost

SPEC = TensorSpec(dtype=torch.float32, shape=(2,), device="cpu")


class Rank:
    """A rank's end of a connection."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.book = Book()

    def call(self, name: str) -> None:
        self.connection.send_bytes(self.book.pack_request(Request(kind="allreduce", name=name, specs=(SPEC,))))

    def told(self) -> list[str] | None:
        """The names of what this rank is told to do next; None once it may go."""
        assert self.connection.poll(5), "the coordinator is silent"
        response = self.book.unpack_response(self.connection.recv_bytes())
        return None if response is None else [request.name for request in response.requests]


def two_ranks(**pace) -> tuple[Coordinator, Rank, Rank]:
    started = Coordinator(2, pace=Pace(**pace), on_this_host=True)
    first = Rank(started.start())
    return started, first, Rank(connect("127.0.0.1", started.address, 1))


def test_a_fault_of_the_coordinator_reaches_all_ranks():
    started, first, second = two_ranks()
    first.call("a")
    second.connection.send_bytes(b"not a message")
    for rank in (first, second):
        with pytest.raises(HorovodInternalError, match=r"rank 0 cannot negotiate any more: .*HOROVOD_NEGOTIATION"):
            rank.told()
        with pytest.raises((EOFError, OSError)):
            rank.told()
    started.join(5)


def test_a_closed_standard_error_does_not_end_the_negotiation(monkeypatch):
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    monkeypatch.setattr(coordinator, "_LOOK_SECONDS", 0.01)
    _, first, second = two_ranks(warn_seconds=0.01)
    first.call("a")
    time.sleep(0.2)
    second.call("a")
    assert first.told() == second.told() == ["a"]


def test_the_others_are_told_of_a_rank_that_ends_without_leaving():
    started, first, second = two_ranks()
    for rank in (first, second):
        rank.call("a")
    assert first.told() == second.told() == ["a"]
    second.connection.close()
    assert first.connection.poll(5)
    assert first.book.unpack_response(first.connection.recv_bytes()) == Lost(1)
    first.connection.send(LEAVE)
    assert first.told() is None
    started.join(5)


def test_a_rank_that_leaves_is_sent_what_all_have_agreed_on():
    started, first, second = two_ranks(cycle_seconds=0.4)
    for name in "ab":  # the second waits for the cycle to end, and meanwhile a rank asks to leave
        first.call(name)
        second.call(name)
        if name == "b":
            time.sleep(0.1)
            second.connection.send(LEAVE)
        assert first.told() == second.told() == [name]
    assert second.told() is None
    first.call("c")
    response = first.book.unpack_response(first.connection.recv_bytes())
    assert response is not None
    assert response.problem is not None
    assert response.problem.code == "HOROVOD_RANK_LEFT"
    first.connection.send(LEAVE)
    assert first.told() is None
    started.join(5)
