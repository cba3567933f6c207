"""What ends in every case: handles, operations that all ranks have called, and the groups of a rank that leaves."""

from __future__ import annotations

import threading
import time
from multiprocessing import Pipe

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
    a_shutdown_while_an_operation_is_done(rank)


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


def a_shutdown_while_an_operation_is_done(rank: int) -> None:
    engine._LEAVE_SECONDS = 0.1
    hvd.init()
    if rank == 0:
        usual = collectives.allreduce

        def late(*given, **options):
            time.sleep(0.8)
            usual(*given, **options)

        collectives.allreduce = late
    handle = hvd.allreduce_async(torch.full((2,), rank + 1.0), op=hvd.Sum)
    if rank == 1:
        while runtime.engine()._pending:  # until it is being done
            time.sleep(0.01)
        hvd.shutdown()
        assert dist.is_initialized(), "the group is taken from under the operation"
    assert hvd.synchronize(handle).tolist() == [3.0, 3.0]
    for thread in threading.enumerate():
        if thread.name == ENGINE_THREAD and rank == 1:
            thread.join(5)
    hvd.shutdown()
    leave_group()


@pytest.mark.gloo
def test_the_groups_of_two_ranks(tmp_path):
    run_distributed(groups_of_two_ranks, 2, str(tmp_path / "store"), timeout_seconds=60)
