"""Each operation against arithmetic, in three processes over gloo."""

from __future__ import annotations

import os
import time

import pytest
import torch
from ranks import run_distributed

import toolkit.compat.horovod as hvd
from toolkit.compat.horovod.errors import (
    HorovodInternalError,
    HorovodOrderError,
    HorovodTypeError,
    HorovodValueError,
    NotBuiltError,
)

SIZE = 3
pytestmark = pytest.mark.gloo


def at(rank: int) -> torch.Tensor:
    """What a rank gives."""
    return torch.arange(6.0).reshape(2, 3) * (rank + 1) + rank


EVERY = torch.stack([at(rank) for rank in range(SIZE)])
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


@case
def place(rank):
    assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (rank, SIZE, rank, SIZE)
    assert (hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous(), hvd.is_initialized()) == (0, 1, True, True)
    assert (hvd.mpi_threads_supported(), hvd.mpi_built(), hvd.nccl_built(), hvd.gloo_built()) == (False, False, 0, True)


@case
def reductions(rank):
    torch.testing.assert_close(hvd.allreduce(at(rank)), EVERY.mean(0))
    expected = {hvd.Sum: EVERY.sum(0), hvd.Min: EVERY.amin(0), hvd.Max: EVERY.amax(0), hvd.Product: EVERY.prod(0)}
    for op, result in expected.items():
        torch.testing.assert_close(hvd.allreduce(at(rank), op=op), result)
    scaled = hvd.allreduce(at(rank), op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
    torch.testing.assert_close(scaled, 1.5 * EVERY.sum(0))
    with pytest.warns(DeprecationWarning, match="op=hvd.Sum"):
        torch.testing.assert_close(hvd.allreduce(at(rank), average=False), EVERY.sum(0))


@case
def arguments_of_a_wrong_type(rank):
    for wrong in (
        lambda: hvd.allreduce([1, 2]),
        lambda: hvd.allreduce_async([1, 2]),
        lambda: hvd.allreduce_([1, 2]),
        lambda: hvd.grouped_allreduce([at(rank), None]),
        lambda: hvd.allgather([1, 2]),
        lambda: hvd.broadcast([1, 2], 0),
        lambda: hvd.broadcast_([1, 2], 0),
        lambda: hvd.alltoall([1, 2]),
        lambda: hvd.reducescatter([1, 2]),
    ):
        with pytest.raises(HorovodTypeError, match=r"tensor=(\[1, 2\]|None) is of type .*torch.Tensor"):
            wrong()
    for wrong in (lambda: hvd.synchronize(12345), lambda: hvd.poll(12345)):
        with pytest.raises(TypeError, match="handle=12345 is of type int, not the handle"):
            wrong()


@case
def reductions_of_other_types(rank):
    assert hvd.allreduce(torch.tensor([rank, -rank - 2])).tolist() == [1, -3]  # an average of integers is rounded down
    assert hvd.allreduce(torch.tensor([rank == 1, False]), op=hvd.Sum).tolist() == [True, False]
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.uint8):
        result = hvd.allreduce(torch.tensor([rank, 2], dtype=dtype), op=hvd.Sum)
        assert (result.dtype, result.tolist()) == (dtype, [3, 6])
    assert hvd.allreduce(torch.tensor(float(rank))).shape == ()
    compressed = hvd.allreduce(at(rank) / 7, compression=hvd.Compression.fp16)
    assert compressed.dtype == torch.float32
    torch.testing.assert_close(compressed, EVERY.mean(0) / 7, rtol=2e-3, atol=2e-3)


@case
def in_place_and_asynchronous(rank):
    x = at(rank)
    assert hvd.allreduce_(x, op=hvd.Sum) is x
    torch.testing.assert_close(x, EVERY.sum(0))
    across = at(rank).t()
    hvd.allreduce_(across)
    torch.testing.assert_close(across, EVERY.mean(0).t())
    given = at(rank)
    handle = hvd.allreduce_async(given, name="later")
    result = hvd.synchronize(handle)
    assert hvd.poll(handle)
    torch.testing.assert_close(result, EVERY.mean(0))
    assert torch.equal(given, at(rank))
    first, second = hvd.grouped_allreduce([at(rank), torch.tensor([rank])], op=hvd.Sum)
    assert torch.equal(first, EVERY.sum(0))
    assert second.tolist() == [3]
    both = [at(rank), at(rank) + 1]
    hvd.grouped_allreduce_(both)
    torch.testing.assert_close(both[1], EVERY.mean(0) + 1)


@case
def calls_in_another_order_on_each_rank(rank):
    names = [f"t{index}" for index in range(20)]
    order = names if rank == 0 else names[::-1] if rank == 1 else names[7:] + names[:7]
    handles = {
        name: hvd.allreduce_async(torch.full((3,), float(rank + int(name[1:]))), name=name, op=hvd.Sum)
        for name in order
    }
    for name in names:
        assert hvd.synchronize(handles[name]).tolist() == [3.0 + 3 * int(name[1:])] * 3


@case
def gathers(rank):
    rows = torch.full((rank, 2), rank)
    assert hvd.allgather(rows).tolist() == [[1, 1], [2, 2], [2, 2]]
    assert hvd.allgather(torch.tensor([rank == 1])).tolist() == [False, True, False]
    assert hvd.allgather(torch.empty(0, 4)).shape == (0, 4)
    first, second = hvd.grouped_allgather([rows, torch.tensor([rank])])
    assert first.shape == (3, 2)
    assert second.tolist() == [0, 1, 2]
    assert hvd.allgather_object({"rank": rank}) == [{"rank": other} for other in range(SIZE)]


@case
def broadcasts(rank):
    assert torch.equal(hvd.broadcast(at(rank), 2), at(2))
    x = at(rank)
    assert hvd.broadcast_(x, 1) is x
    assert torch.equal(x, at(1))
    assert hvd.broadcast(torch.tensor([rank == 1]), 1).tolist() == [True]
    assert hvd.broadcast_object([rank] if rank == 1 else None, root_rank=1) == [1]
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    sums = hvd.allgather(torch.cat([value.flatten().float() for value in model.state_dict().values()])[None])
    assert torch.equal(sums[0], sums[1])
    assert torch.equal(sums[0], sums[2])


@case
def alltoalls(rank):
    result = hvd.alltoall(torch.arange(6) + 10 * rank)
    assert result.tolist() == [10 * source + 2 * rank + index for source in range(SIZE) for index in range(2)]
    splits = [rank, 1, 2 - rank]
    output, received = hvd.alltoall(torch.full((3,), rank), splits=torch.tensor(splits))
    counts = [[source, 1, 2 - source][rank] for source in range(SIZE)]
    assert received.tolist() == counts
    assert output.tolist() == [source for source in range(SIZE) for _ in range(counts[source])]


@case
def reducescatters(rank):
    whole = torch.arange(10.0).reshape(5, 2)
    mine = [whole[:2], whole[2:4], whole[4:]][rank]
    torch.testing.assert_close(hvd.reducescatter(whole * (rank + 1), op=hvd.Sum), 6 * mine)
    torch.testing.assert_close(hvd.reducescatter(whole * (rank + 1)), 2 * mine)
    first, second = hvd.grouped_reducescatter([whole, at(rank)], op=hvd.Sum, prescale_factor=2.0)
    torch.testing.assert_close(first, 6 * mine)
    torch.testing.assert_close(second, 2 * EVERY.sum(0)[rank : rank + 1])


@case
def sparse(rank):
    mine = torch.sparse_coo_tensor([[0, rank], [rank, 0]], [1.0, 2.0], (3, 3), check_invariants=True).coalesce()
    total = hvd.synchronize(hvd.sparse_allreduce_async(mine, name="sparse", op=hvd.Average)).to_dense()
    every = [
        torch.sparse_coo_tensor([[0, one], [one, 0]], [1.0, 2.0], (3, 3), check_invariants=True).to_dense()
        for one in range(SIZE)
    ]
    torch.testing.assert_close(total, torch.stack(every).mean(0))


@case
def gradients(rank):
    weights = at(rank) + 1  # the gradient that reaches each result

    def gradient(function, given, weight):
        x = given.clone().requires_grad_()
        (function(x) * weight).sum().backward()
        return x.grad

    mean = EVERY.mean(0) + 1
    torch.testing.assert_close(gradient(hvd.allreduce, at(rank), weights), mean)
    torch.testing.assert_close(gradient(lambda x: hvd.allreduce(x, op=hvd.Sum), at(rank), weights), SIZE * mean)
    torch.testing.assert_close(gradient(lambda x: hvd.broadcast(x, 1), at(rank), weights), mean * (rank == 1))
    gathered = torch.arange(12.0).reshape(6, 2)
    rows = slice(rank * (rank + 1) // 2, (rank + 1) * (rank + 2) // 2)
    got = gradient(hvd.allgather, torch.ones(rank + 1, 2), gathered * (rank + 1))
    torch.testing.assert_close(got, 2 * gathered[rows])
    splits = [rank, 1, 2 - rank]
    got = gradient(lambda x: hvd.alltoall(x, splits=splits)[0], torch.ones(3), float(rank + 1))
    assert got.tolist() == [to + 1.0 for to in range(SIZE) for _ in range(splits[to])]
    got = gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum), torch.ones(SIZE), float(rank + 1))
    assert got.tolist() == [SIZE * (to + 1.0) for to in range(SIZE)]
    assert gradient(hvd.reducescatter, torch.ones(SIZE), float(rank + 1)).tolist() == [1.0, 2.0, 3.0]
    with pytest.raises(NotBuiltError, match=r"the gradient of an allreduce with Max .*HOROVOD_NOT_BUILT"):
        gradient(lambda x: hvd.allreduce(x, op=hvd.Max), at(rank), weights)


@case
def process_sets(rank):
    outer, last = hvd.add_process_set([0, 2]), hvd.add_process_set(hvd.ProcessSet([2]))
    assert hvd.get_process_set_ids_and_ranks() == {0: [0, 1, 2], 1: [0, 2], 2: [2]}
    assert (outer.included(), outer.rank()) == (rank != 1, {0: 0, 1: -1, 2: 1}[rank])
    if rank != 1:
        torch.testing.assert_close(hvd.allreduce(at(rank), process_set=outer), (at(0) + at(2)) / 2)
        assert hvd.allgather(torch.tensor([rank]), process_set=outer).tolist() == [0, 2]
        assert hvd.broadcast_object(rank, root_rank=2, process_set=outer) == 2
        with pytest.raises(HorovodValueError, match=r"root_rank=1 is not in .*Use one of \[0, 2\]"):
            hvd.broadcast(at(rank), 1, process_set=outer)
    else:
        with pytest.raises(HorovodValueError, match="allreduce is called on rank 1, which is not in"):
            hvd.allreduce(at(rank), process_set=outer)
    with pytest.raises(HorovodValueError, match="is a process set already"):
        hvd.add_process_set([2, 0])
    assert hvd.remove_process_set(last)
    assert not hvd.remove_process_set(hvd.global_process_set)
    with pytest.raises(HorovodValueError, match=r"ProcessSet\(process_set_id=None"):
        last.size()


@case
def joins(rank):
    """Rank r has r batches: the others go on without it."""
    for batch in range(rank):
        total = hvd.allreduce(torch.ones(2), op=hvd.Sum)
        assert total.tolist() == [float(SIZE - 1 - batch)] * 2
    if rank == 2:
        time.sleep(0.05)
        with pytest.raises(HorovodInternalError, match="HOROVOD_JOINED"):
            hvd.allgather(torch.ones(1), name="alone")
    assert hvd.join() == 2
    assert hvd.allreduce(torch.ones(2)).tolist() == [1.0, 1.0]  # names are counted anew


@case
def mismatches(rank):
    with pytest.raises(
        HorovodInternalError, match=r"is float32\[2\] on cpu on rank 0 and float32\[3\] on cpu on rank 1"
    ):
        hvd.allreduce(torch.ones(2 + rank), name="shape")
    with pytest.raises(HorovodInternalError, match="HOROVOD_MISMATCH"):
        hvd.broadcast(torch.ones(2, dtype=torch.float64 if rank else torch.float32), 0, name="type")
    with pytest.raises(HorovodInternalError, match="the operation is allreduce on rank 0 and allgather on rank 1"):
        (hvd.allgather if rank == 1 else hvd.allreduce)(torch.ones(2), name="kind")
    hvd.barrier()


@case
def arguments(rank):
    if rank == 0:
        handle = hvd.allreduce_async(torch.ones(2), name="twice")
        with pytest.raises(HorovodOrderError, match="HOROVOD_NAME"):
            hvd.allreduce_async(torch.ones(2), name="twice")
    hvd.barrier()
    if rank != 0:
        handle = hvd.allreduce_async(torch.ones(2), name="twice")
    assert hvd.synchronize(handle).tolist() == [1.0, 1.0]
    wrong = [
        (lambda: hvd.allreduce(torch.ones(2), average=True, op=hvd.Sum), "average=True and op=Sum"),
        (lambda: hvd.reducescatter(torch.ones(3), op=hvd.Max), "Use one of hvd.Average, hvd.Sum"),
        (lambda: hvd.allgather(torch.tensor(1.0)), "without dimensions"),
        (lambda: hvd.alltoall(torch.ones(4)), "3 ranks do not divide the first dimension of 4"),
        (lambda: hvd.alltoall(torch.ones(4), splits=[1, 1, 1]), "whose sum is 4"),
        (lambda: hvd.allreduce(torch.tensor([True])), "truth values"),
        (lambda: hvd.broadcast(torch.ones(1), 3), r"root_rank=3 is not in"),
        (lambda: hvd.broadcast_parameters({"a": 1}, 0), "a is not a tensor"),
        (lambda: hvd.add_process_set([0, 3]), "Name ranks from 0 to 2"),
    ]
    for call, told in wrong:
        with pytest.raises(HorovodValueError, match=told):
            call()
    with pytest.raises(NotBuiltError, match=r"op=hvd.Adasum .*HOROVOD_NOT_BUILT"):
        hvd.allreduce(torch.ones(2), op=hvd.Adasum)
    hvd.barrier()


@case
def a_rank_that_leaves(rank):
    if rank == 2:
        hvd.shutdown()
        with pytest.raises(HorovodValueError, match="HOROVOD_NOT_INITIALIZED"):
            hvd.rank()
        return
    with pytest.raises(HorovodInternalError, match=r"needs ranks? ([01], )?2, which ended or called shutdown"):
        hvd.allreduce(torch.ones(2))
    hvd.shutdown()


def run_cases(rank: int) -> dict[str, str]:
    os.environ["HOROVOD_CYCLE_TIME"] = "0.1"
    hvd.init()
    failed = {}
    for name, function in CASES.items():
        try:
            function(rank)
        except BaseException as error:
            failed[name] = repr(error)
            break
    return failed


def test_each_operation_is_what_arithmetic_says():
    assert run_distributed(run_cases, SIZE, timeout_seconds=120) == [{}] * SIZE


def test_a_process_alone(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(HorovodValueError, match="HOROVOD_NOT_INITIALIZED"):
        hvd.allreduce(torch.ones(1))
    for _ in range(2):
        hvd.init()
        assert (hvd.rank(), hvd.size(), hvd.join()) == (0, 1, 0)
        assert hvd.allreduce(torch.ones(2)).tolist() == [1.0, 1.0]
        assert hvd.allgather(torch.ones(2)).tolist() == [1.0, 1.0]
        hvd.shutdown()
    assert not hvd.is_initialized()
    assert not torch.distributed.is_initialized()
