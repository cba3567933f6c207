"""The order in which operations are done, and what ranks that disagree are told."""

from __future__ import annotations

import pytest
import torch

from toolkit.compat.horovod.messages import Kind, ReduceOp, Request, TensorSpec
from toolkit.compat.horovod.negotiation import Negotiation

SPEC = TensorSpec(dtype=torch.float32, shape=(2, 3), device="cpu")


def request(name: str, kind: Kind = "allreduce", **options) -> Request:
    return Request(kind=kind, name=name, **{"specs": (SPEC,), **options})


def negotiation(size: int, **options) -> Negotiation:
    return Negotiation(size, **{"fusion_bytes": 0, **options})


def names(table: Negotiation) -> list[list[str]]:
    return [[one.name for one in response.requests] for _, response in table.take_ready()]


def test_an_operation_is_done_when_all_ranks_have_called_it_and_in_that_order():
    table = negotiation(2)
    for name in "abc":
        table.submit(0, request(name))
    assert names(table) == []
    for name in "cab":
        table.submit(1, request(name))
    assert names(table) == [["c"], ["a"], ["b"]]
    assert names(table) == []


def test_reductions_of_one_type_are_done_together_up_to_a_size():
    table = negotiation(1, fusion_bytes=2 * SPEC.num_bytes)
    half = TensorSpec(dtype=torch.float16, shape=(4,), device="cpu")
    for name, options in (("a", {}), ("x", {"specs": (half,)}), ("b", {}), ("c", {}), ("s", {"op": ReduceOp.AVERAGE})):
        table.submit(0, request(name, **options))
    table.submit(0, request("g", kind="allgather"))
    assert names(table) == [["a", "b"], ["x"], ["c"], ["s"], ["g"]]


def test_a_factor_that_is_no_number_on_all_ranks_is_the_same():
    table = negotiation(2)
    for rank, prescale in enumerate((float("nan"), float("nan"))):
        table.submit(rank, request("a", prescale=prescale))
    ((_, response),) = table.take_ready()
    assert response.problem is None
    table.submit(0, request("b", prescale=float("nan")))
    table.submit(1, request("b", prescale=1.0))
    ((_, response),) = table.take_ready()
    assert "prescale_factor is nan on rank 0 and 1.0 on rank 1" in response.problem.message


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (
            {"specs": (TensorSpec(dtype=torch.float32, shape=(2, 4), device="cpu"),)},
            "the tensor is float32[2, 3] on cpu",
        ),
        (
            {"specs": (TensorSpec(dtype=torch.float64, shape=(2, 3), device="cpu"),)},
            "and float64[2, 3] on cpu on rank 1",
        ),
        (
            {"specs": (TensorSpec(dtype=torch.float32, shape=(2, 3), device="cuda"),)},
            "and float32[2, 3] on cuda on rank 1",
        ),
        ({"specs": (SPEC, SPEC)}, "the number of tensors is 1 on rank 0 and 2 on rank 1"),
        ({"op": ReduceOp.MAX}, "the reduction is Sum on rank 0 and Max on rank 1"),
        ({"prescale": 2.0}, "prescale_factor is 1.0 on rank 0 and 2.0 on rank 1"),
        ({"kind": "allgather"}, "the operation is allreduce on rank 0 and allgather on rank 1"),
    ],
)
def test_ranks_that_disagree(other, told):
    table = negotiation(3)
    for rank, options in enumerate(({}, other, {})):
        table.submit(rank, request("a", **options))
    ((ranks, response),) = table.take_ready()
    assert ranks == (0, 1, 2)
    assert response.problem is not None
    assert response.problem.code == "HOROVOD_MISMATCH"
    assert told in response.problem.message


def test_gathered_rows_may_differ_and_are_told_to_all():
    table = negotiation(2)
    other = TensorSpec(dtype=torch.float32, shape=(5, 3), device="cpu")
    table.submit(1, request("a", kind="allgather", specs=(other, SPEC)))
    table.submit(0, request("a", kind="allgather", specs=(SPEC, SPEC)))
    ((_, response),) = table.take_ready()
    assert response.problem is None
    assert response.rows == ((2, 5), (2, 2))


def test_a_rank_that_has_joined_is_not_waited_for():
    table = negotiation(3)
    table.submit(0, request("a"))
    table.submit(1, request("a"))
    table.submit(2, Request(kind="join", name="join"))
    ((ranks, response),) = table.take_ready()
    assert (ranks, response.problem) == ((0, 1, 2), None)
    for rank in (0, 1):
        table.submit(rank, request("b", op=ReduceOp.MIN))
    ((ranks, response),) = table.take_ready()
    assert ranks == (0, 1)
    assert response.problem is not None
    assert response.problem.code == "HOROVOD_JOINED"
    assert "allreduce with Min 'b' after join() on rank 2" in response.problem.message
    table.submit(1, Request(kind="join", name="join"))
    table.submit(0, Request(kind="join", name="join"))
    ((ranks, response),) = table.take_ready()
    assert (ranks, response.number) == ((0, 1, 2), 0)


def test_a_rank_that_has_left_fails_what_needs_it():
    table = negotiation(3)
    table.submit(0, Request(kind="add_process_set", name="s", ranks=(0, 1), specs=()))
    for rank in (1, 2):
        table.submit(rank, Request(kind="add_process_set", name="s", ranks=(0, 1)))
    ((_, response),) = table.take_ready()
    assert response.number == 1
    table.submit(0, request("a"))
    table.leave(2)
    table.submit(1, request("b"))
    table.submit(1, Request(kind="join", name="join"))
    for rank in (0, 1):
        table.submit(rank, request("c", set_id=1))
    told = [
        (ranks, response.requests[0].name, response.problem and response.problem.code)
        for ranks, response in table.take_ready()
    ]
    left = "HOROVOD_RANK_LEFT"
    assert told == [((0,), "a", left), ((1,), "b", left), ((1,), "join", left), ((0, 1), "c", None)]


def test_a_stalled_operation_is_named_once_and_may_fail():
    now = 0.0
    table = negotiation(3, clock=lambda: now)
    table.submit(1, request("a"))
    now = 61.0
    stalled = {"warn_seconds": 60.0, "fail_seconds": 100.0}
    assert list(table.stalled(**stalled)) == [
        "horovod: allreduce 'a' has waited for 61 s: called by rank 1, not by ranks 0, 2"
    ]
    assert list(table.stalled(**stalled)) == []
    now = 101.0
    assert list(table.stalled(**stalled)) == []
    ((ranks, response),) = table.take_ready()
    assert ranks == (1,)
    assert response.problem is not None
    assert response.problem.code == "HOROVOD_STALLED"
