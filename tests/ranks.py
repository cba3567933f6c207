"""Runs a function in several real processes: on the CPU over gloo, or on cards over NCCL."""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import queue
import random
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from typing import Any
from unittest import mock

# Imported once a session, by a server that starts no thread of its own and joins no group; each rank is forked from it.
# A rank that imported them itself would take 10 s of a core. What cannot be imported there, a rank imports as usual.
PRELOADED = [
    "torch",
    "deepspeed",
    "transformers",
    "datasets",
    "peft",
    "accelerate",
    "pytest",
    "hypothesis",
    "toolkit.trainer.loop",
    "toolkit.exporter.export",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
]
# For every process that a test starts, by whatever command. Without the second, an engine's first import of DeepSpeed's
# Muon, which no test uses, imports torch's compiler: 2 s of a core for each process.
QUICK = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
# On a busy machine gloo at times closes a connection while it makes its mesh: the ranks are then started anew.
JOINS = 3
# Those that count only if they are there before torch is imported.
ENVIRONMENT = {
    **QUICK,
    "DS_ACCELERATOR": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONWARNINGS": "ignore::FutureWarning",  # torch renames collectives that DeepSpeed still calls by their old names
}
AT_START = dict(os.environ)
# Ranks of one card are an error to NCCL (init.cc initTransportsRank), unless they say that they are of different machines,
# which talk over sockets.
ONE_CARD = {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}


class RankError(AssertionError):
    """A rank failed; the message holds its traceback."""


class JoinError(RankError):
    """The ranks did not meet, so that nothing of what is tested has run."""


def run_distributed(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_seconds: float = 300.0
) -> list[Any]:
    """Calls `function(rank, *args)` in `world_size` new processes that share a gloo group.

    A launch takes about a second (the first of a session ten, for the imports), so put many cases into one function.

    Args:
        function: A module-level function of the test module (it is found by name in the new process).
        world_size: Number of processes; each has RANK, LOCAL_RANK, WORLD_SIZE and a rendezvous in its environment, and
            `torch.distributed` initialised, so `deepspeed.initialize` works at once.
        args: What `function` takes after the rank; must pickle.
        timeout_seconds: After so long every process is killed and the call fails.
    Returns:
        What each rank returned, in rank order; must pickle.
    Raises:
        RankError: With the traceback of the rank that failed first, or the name of those that hang or died.
    """
    for _ in range(JOINS - 1):
        try:
            return _launch(function, world_size, args, timeout_seconds=timeout_seconds)
        except JoinError:
            continue
    return _launch(function, world_size, args, timeout_seconds=timeout_seconds)


def run_on_cards(
    function: Callable[..., Any], world_size: int, *args: Any, num_cards: int, timeout_seconds: float = 300.0
) -> list[Any]:
    """Calls `function(rank, *args)` in `world_size` new processes that see CUDA devices; the function joins the group itself.

    Args:
        function: As `run_distributed` takes it.
        world_size: Number of processes. Where that is more than there are cards, all of them share the first: as exact as on
            cards of their own, and slow.
        args: What `function` takes after the rank; must pickle.
        num_cards: CUDA devices of the machine.
        timeout_seconds: After so long every process is killed and the call fails.
    Returns:
        What each rank returned, in rank order; must pickle.
    Raises:
        RankError: As `run_distributed` raises it.
    """
    context = multiprocessing.get_context("spawn")  # a process that is forked cannot use CUDA
    results: Queue[tuple[int, str, Any]] = context.Queue()
    shared = num_cards < world_size
    environment = {
        **os.environ,
        **QUICK,
        **(ONE_CARD if shared else {}),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(1 if shared else world_size),
    }
    ranks = [
        {"RANK": str(rank), "LOCAL_RANK": str(0 if shared else rank)} | ({"NCCL_HOSTID": f"{rank}"} if shared else {})
        for rank in range(world_size)
    ]
    processes: list[BaseProcess] = [
        context.Process(target=_run_on_card, args=(function, rank, environment | own, args, results), daemon=True)
        for rank, own in enumerate(ranks)
    ]
    return _wait_for(processes, results, timeout_seconds=timeout_seconds)


def _launch(
    function: Callable[..., Any], world_size: int, args: tuple[Any, ...], *, timeout_seconds: float
) -> list[Any]:
    from torch.distributed import TCPStore

    context = preloaded()
    results: Queue[tuple[int, str, Any]] = context.Queue()
    # Held here, so that nobody can take its port before the ranks meet there.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        **os.environ,
        **ENVIRONMENT,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),  # for what a rank starts after it has left the group
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
    }
    processes: list[BaseProcess] = [
        context.Process(target=_run_rank, args=(function, rank, environment, store.port, args, results), daemon=True)
        for rank in range(world_size)
    ]
    return _wait_for(processes, results, timeout_seconds=timeout_seconds)


def _wait_for(
    processes: list[BaseProcess], results: Queue[tuple[int, str, Any]], *, timeout_seconds: float
) -> list[Any]:
    try:
        for process in processes:
            process.start()
        return _collect(processes, results, deadline=time.monotonic() + timeout_seconds)
    finally:
        for process in processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()


def preloaded() -> ForkServerContext:
    """Return a context whose processes are forked from the server that has imported what ranks need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    # Whatever the test that comes first has set: what is imported here serves all the others.
    with mock.patch.dict(os.environ, AT_START | ENVIRONMENT, clear=True):
        multiprocessing.forkserver.ensure_running()
    return context


def _collect(processes: list[BaseProcess], results: Queue[tuple[int, str, Any]], *, deadline: float) -> list[Any]:
    """Waits for each rank's result; the first failure ends the wait."""
    returned: dict[int, Any] = {}
    while len(returned) < len(processes):
        try:
            rank, ended, value = results.get(timeout=0.2)
        except queue.Empty:
            dead = [
                f"rank {rank} (exit code {process.exitcode})"
                for rank, process in enumerate(processes)
                if rank not in returned and process.exitcode not in (None, 0)
            ]
            if dead:
                raise RankError(f"{', '.join(dead)} died without a traceback") from None
            if time.monotonic() > deadline:
                waiting = sorted(set(range(len(processes))) - returned.keys())
                raise RankError(f"ranks {waiting} had not finished at the timeout") from None
            continue
        if ended != "returned":
            kind = RankError if ended == "raised" else JoinError
            raise kind(f"rank {rank} of {len(processes)} failed:\n{value}")
        returned[rank] = pickle.loads(value)
    return [returned[rank] for rank in range(len(processes))]


def _run_rank(
    function: Callable[..., Any],
    rank: int,
    environment: Mapping[str, str],
    port: int,
    args: tuple[Any, ...],
    results: Queue[tuple[int, str, Any]],
) -> None:
    """Body of a process: joins the group, calls the function, reports."""
    gc.freeze()  # DeepSpeed collects garbage at times: all that was imported need not be walked, nor its pages be copied
    os.environ.clear()  # the server's, which may be that of another test
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    import torch

    torch.set_num_threads(1)
    ended = "apart"
    try:
        without_compilation()
        world_size = int(environment["WORLD_SIZE"])
        store = torch.distributed.TCPStore("127.0.0.1", port, world_size=world_size, is_master=False)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        ended = "raised"
        results.put((rank, "returned", _returned(function, rank, args)))
        if torch.distributed.is_initialized():  # the function may have left the group
            torch.distributed.barrier()
    except BaseException:
        results.put((rank, ended, traceback.format_exc()))
    finally:
        # Flushed before the exit; the group is left to it, since a peer that failed would block the destruction.
        results.close()
        results.join_thread()
        os._exit(0)


def _returned(function: Callable[..., Any], rank: int, args: tuple[Any, ...]) -> bytes:
    """What a function returns. A queue would send tensors as file descriptors, which the rank that has ended serves no more."""
    return pickle.dumps(function(rank, *args))


def _run_on_card(
    function: Callable[..., Any],
    rank: int,
    environment: Mapping[str, str],
    args: tuple[Any, ...],
    results: Queue[tuple[int, str, Any]],
) -> None:
    """Body of a process that sees cards."""
    os.environ.clear()
    os.environ.update(environment)
    try:
        results.put((rank, "returned", _returned(function, rank, args)))
    except BaseException:
        results.put((rank, "raised", traceback.format_exc()))
    finally:
        results.close()
        results.join_thread()
        os._exit(0)


def leave_group() -> None:
    """Leaves the group of `run_distributed`, so that each `tk.initialize` that follows joins groups of its own and leaves them.

    A function that makes many runs calls it first: groups that others joined are kept, each of them keeps threads, and with
    hundreds of those a step takes twice the time.
    """
    import torch

    if torch.distributed.is_initialized():  # not under `run_on_cards`
        torch.distributed.destroy_process_group()


def without_compilation() -> None:
    """Keeps DeepSpeed from compiling collectives that only tensor-parallel inference calls (toolkit/distributed/world.py)."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def free_port() -> int:
    """Return a port that nobody listens on, and that the system gives to nobody who asks for any (those begin at 32768).

    So two tests that run at once do not take it from each other between this call and its use.
    """
    draw = random.SystemRandom()
    while True:
        port = draw.randrange(10_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port


@contextmanager
def one_rank() -> Iterator[None]:
    """Makes a group of this process alone: DeepSpeedConfig asks its mpu for the world size only where a group is up."""
    import deepspeed
    import torch

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    before = {name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    without_compilation()
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    try:
        yield
    finally:
        deepspeed.comm.comm.cdb = None
        torch.distributed.destroy_process_group()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
