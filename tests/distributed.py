"""Runs a function in several real processes on the CPU, over gloo."""

from __future__ import annotations

import multiprocessing
import os
import queue
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.context import SpawnProcess
from multiprocessing.queues import Queue
from typing import Any


class RankError(AssertionError):
    """A rank failed; the message holds its traceback."""


def run_distributed(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_seconds: float = 300.0
) -> list[Any]:
    """Calls `function(rank, *args)` in `world_size` new processes that share a gloo group.

    A launch takes several seconds (each process imports torch), so put many cases into one function.

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
    context = multiprocessing.get_context("spawn")
    results: Queue[tuple[int, bool, Any]] = context.Queue()
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONWARNINGS": "ignore::FutureWarning",  # torch renames collectives that DeepSpeed still calls by their old names
    }
    processes = [
        context.Process(target=_run_rank, args=(function, rank, environment, args, results), daemon=True)
        for rank in range(world_size)
    ]
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)  # OMP_NUM_THREADS counts only if it is there before the child imports torch
    try:
        for process in processes:
            process.start()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    try:
        return _collect(processes, results, deadline=time.monotonic() + timeout_seconds)
    finally:
        for process in processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()


def _collect(processes: list[SpawnProcess], results: Queue[tuple[int, bool, Any]], *, deadline: float) -> list[Any]:
    """Waits for each rank's result; the first failure ends the wait."""
    returned: dict[int, Any] = {}
    while len(returned) < len(processes):
        try:
            rank, succeeded, value = results.get(timeout=0.2)
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
        if not succeeded:
            raise RankError(f"rank {rank} of {len(processes)} failed:\n{value}")
        returned[rank] = value
    return [returned[rank] for rank in range(len(processes))]


def _run_rank(
    function: Callable[..., Any],
    rank: int,
    environment: dict[str, str],
    args: tuple[Any, ...],
    results: Queue[tuple[int, bool, Any]],
) -> None:
    """Body of a process: joins the group, calls the function, reports."""
    os.environ.update(environment)
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank)})
    import torch

    torch.set_num_threads(1)
    try:
        torch.distributed.init_process_group("gloo", rank=rank, world_size=int(environment["WORLD_SIZE"]))
        results.put((rank, True, function(rank, *args)))
        torch.distributed.barrier()
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
    finally:
        # Flushed before the exit; the group is left to it, since a peer that failed would block the destruction.
        results.close()
        results.join_thread()
        os._exit(0)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
