"""What ends in every case: handles, operations that all ranks have called, and the groups of a rank that leaves."""

from __future__ import annotations

import threading
import time
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import leave_group, run_distributed

import toolkit.compat.horovod as hvd
from toolkit.compat.horovod import collectives, engine, runtime
from toolkit.compat.horovod.engine import ENGINE_THREAD, Engine, Handle
from toolkit.compat.horovod.errors import HorovodInternalError
from toolkit.compat.horovod.messages import Request, Response, TensorSpec
from toolkit.compat.horovod.wire import LEAVE, Book


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    far, near = Pipe()
    yield far, Engine(rank=0, size=1, connection=near, group=dist.group.WORLD, device=None)
    far.close()
    dist.destroy_process_group()


def call(started: Engine, name: str) -> tuple[Request, Handle]:
    x = torch.ones(2)
    request = Request(kind="allreduce", name=name, specs=(TensorSpec.of(x),))
    return request, started.submit(request, [x], [torch.empty(2)])


def test_whatever_ends_the_engine_fails_its_handles_and_tells_the_coordinator(alone):
    far, started = alone
    _, handle = call(started, "a")
    far.send(3)  # nothing that a coordinator sends
    with pytest.raises(HorovodInternalError, match=r"rank 0 cannot read what rank 0 has sent: TypeError.*HOROVOD_NEG"):
        wait(handle)
    with pytest.raises(HorovodInternalError, match="HOROVOD_NEGOTIATION"):
        call(started, "b")
    far.recv()  # the call of a
    with pytest.raises(EOFError):
        far.recv()


def test_a_rank_that_leaves_does_what_all_have_agreed_on(alone):
    far, started = alone
    (agreed, done), (_, alone_called) = call(started, "a"), call(started, "b")
    leaving = threading.Thread(target=started.leave)
    leaving.start()
    while far.recv() != LEAVE:
        pass
    far.send_bytes(Book().pack_response(Response(requests=(agreed,))))
    far.send(LEAVE)
    leaving.join(5)
    assert wait(done).tolist() == [1.0, 1.0]
    with pytest.raises(HorovodInternalError, match=r"shutdown\(\) has been called"):
        wait(alone_called)


def wait(handle: Handle) -> torch.Tensor:
    assert handle._ended.wait(5), "nothing ends the handle"
    return handle.wait()


def groups_of_two_ranks(rank: int, store: str) -> None:
    leave_group()
    a_world_of_another_backend(rank, store)
    a_shutdown_while_an_operation_is_done(rank, store)
    a_rank_that_ends_once_all_have_agreed(rank, store)


def a_world_of_another_backend(rank: int, store: str) -> None:
    """As a script makes it whose world has NCCL alone: process sets need what the engine's group has."""

    def create(store, rank, size, timeout):
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    dist.Backend.register_backend("other", create, devices=["cpu"])
    dist.init_process_group("cpu:other", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    hvd.init()
    last = hvd.add_process_set([1])
    if rank == 1:
        places = runtime.engine()._places
        assert dist.get_backend_config(places[1].group) == dist.get_backend_config(places[0].group)
        assert hvd.allreduce(torch.ones(2), process_set=last).tolist() == [1.0, 1.0]
    hvd.shutdown()
    dist.destroy_process_group()


def a_shutdown_while_an_operation_is_done(rank: int, store: str) -> None:
    engine._LEAVE_SECONDS = 0.1
    left = Path(f"{store}-left")
    hvd.init()
    if rank == 0:
        usual = collectives.allreduce

        def late(*given, **options):
            while not left.exists():
                time.sleep(0.01)
            usual(*given, **options)

        collectives.allreduce = late
    handle = hvd.allreduce_async(torch.full((2,), rank + 1.0), op=hvd.Sum)
    if rank == 1:
        while runtime.engine()._pending:  # until it is being done
            time.sleep(0.01)
        hvd.shutdown()
        assert dist.is_initialized(), "the group is taken from under the operation"
        left.touch()
    assert hvd.synchronize(handle).tolist() == [3.0, 3.0]
    for thread in threading.enumerate():
        if thread.name == ENGINE_THREAD and rank == 1:
            thread.join(5)
    hvd.shutdown()
    leave_group()


def a_rank_that_ends_once_all_have_agreed(rank: int, store: str) -> None:
    """Rank 1 loses its connection and sends nothing; torch notices no end, as under NCCL, since its sockets stay open."""
    engine._LOST_SECONDS = 0.3
    hvd.init()
    told = Path(f"{store}-told")
    if rank == 1:
        ended = threading.Event()

        def end(*given, **options):
            engine._hang_up(runtime.engine()._connection)
            ended.set()
            time.sleep(60)

        collectives.allreduce = end
        hvd.allreduce_async(torch.ones(2), name="x")
        assert ended.wait(10)
        while not told.exists():
            time.sleep(0.02)
        return
    began = time.monotonic()
    waiting, other = hvd.allreduce_async(torch.ones(2), name="x"), hvd.allreduce_async(torch.ones(2), name="y")
    for handle in (waiting, other):
        with pytest.raises(
            HorovodInternalError, match=r"(rank 1 has ended without|needs rank 1, which).*HOROVOD_RANK_LEFT"
        ):
            hvd.synchronize(handle)
    with pytest.raises(HorovodInternalError, match="rank 1 has ended without"):
        hvd.allreduce(torch.ones(2), name="z")
    hvd.shutdown()
    assert 0.3 < time.monotonic() - began < 20
    told.touch()


@pytest.mark.gloo
def test_the_groups_of_two_ranks(tmp_path):
    run_distributed(groups_of_two_ranks, 2, str(tmp_path / "store"), timeout_seconds=60)
