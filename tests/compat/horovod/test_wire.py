"""Operations that recur are sent by number."""

from __future__ import annotations

import torch

from toolkit.compat.horovod import wire
from toolkit.compat.horovod.messages import Kind, Request, Response, TensorSpec
from toolkit.compat.horovod.wire import LEAVE, Book


def request(name: str, kind: Kind = "allreduce") -> Request:
    return Request(kind=kind, name=name, specs=(TensorSpec(dtype=torch.float32, shape=(2,), device="cpu"),))


def test_what_all_ranks_know_is_sent_as_a_number():
    coordinator, ranks = Book(), [Book(), Book()]
    for asked in (["a"], ["a", "b"], ["c"], ["b", "a"]):
        requests = [request(name) for name in asked]
        for rank in ranks:
            assert [coordinator.unpack_request(rank.pack_request(one)) for one in requests] == requests
        message = coordinator.pack_response(Response(requests=tuple(requests)))
        readers = ranks[:1] if asked == ["c"] else ranks  # a set that the other rank is not in
        for rank in readers:
            assert rank.unpack_response(message) == Response(requests=tuple(requests))
    assert len(ranks[0].pack_request(request("b"))) < 10
    assert len(ranks[1].pack_request(request("c"))) > 100


def test_what_differs_each_time_is_sent_as_it_is(monkeypatch):
    coordinator, rank = Book(), Book()
    gather = Response(requests=(request("g", "allgather"),), rows=((1, 2),))
    assert rank.unpack_response(coordinator.pack_response(gather)) == gather
    monkeypatch.setattr(wire, "_MOST", 1)
    for name in ("a", "b"):
        response = Response(requests=(request(name),))
        assert rank.unpack_response(coordinator.pack_response(response)) == response
    assert len(rank.pack_request(request("a"))) < 10 < len(rank.pack_request(request("b")))
    assert coordinator.unpack_request(wire.pickle.dumps(LEAVE)) is None
    assert rank.unpack_response(wire.pickle.dumps(LEAVE)) is None
