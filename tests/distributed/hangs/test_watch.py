"""Ranks that wait for one that does not come are ended with its name; ranks that wait for one that works are not."""

from __future__ import annotations

import concurrent.futures
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, run_distributed

from toolkit.data.loader import prefetch
from toolkit.distributed.hangs.watch import watching
from toolkit.distributed.world import World, init_world
from toolkit.errors import RunError
from toolkit.topology.grid import Grid

pytestmark = pytest.mark.gloo
SECONDS = 1.2


def skipped(world: World) -> None:
    """Rank 1 leaves out a call."""
    if world.rank == 0:
        dist.all_reduce(torch.ones(3))
    dist.broadcast(torch.ones(5), src=1)


def deadlocked(world: World) -> None:
    if world.rank == 1:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    dist.barrier()


def stalled(world: World) -> None:
    """A source of batches that hangs, in the thread that fetches them."""

    def source() -> Any:
        yield 1
        if world.rank == 1:
            threading.Event().wait()
        yield 2

    for _ in prefetch(source()):
        dist.barrier()


def stopped(world: World) -> None:
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()


def locked(world: World) -> None:
    """A regular expression that takes years holds Python's lock."""
    if world.rank == 1:
        re.match(r"(a+)+$", "a" * 60 + "b")
    dist.barrier()


def works(world: World) -> None:
    """What may take any time takes longer than is allowed: with both ranks in it, and with one that waits in a collective."""
    with world.progress.doing("the save of checkpoint-2"):
        if world.rank == 0:
            time.sleep(1.5 * SECONDS)
        dist.barrier()


def slow_step(world: World) -> None:
    """Micro-batches that get on, and steps that take longer than is allowed, as all of them do."""
    for _ in range(6):
        world.progress.move()
        time.sleep(SECONDS / 3)
    dist.barrier()


def scene(rank: int, body: Callable[[World], None], folder: str) -> str:
    dist.destroy_process_group()
    world = init_world(Grid(pp=1, dp=2, tp=1), backend="gloo")

    def on_hang(error: RunError, tells: bool) -> int:
        (problem,) = error.problems
        (Path(folder) / f"{rank}.json").write_text(json.dumps({"tells": tells, **problem.as_dict()}))
        return 3

    with watching(world, minutes=SECONDS / 60, folder=Path(folder) / "logs", on_hang=on_hang) as keep_stacks:
        keep_stacks()
        for number in range(3):
            with world.progress.step(number):
                dist.all_reduce(torch.ones(2))
        with world.progress.step(3):
            body(world)
    return "passed"


def ended(body: Callable[[World], None], folder: Path) -> tuple[dict[int, dict[str, Any]], list[str]]:
    """What each rank tells, and what the ranks return if they are not ended."""
    returned: list[str] = []
    try:
        returned = run_distributed(scene, 2, body, str(folder), timeout_seconds=30)
    except RankError as error:
        if "died without a traceback" not in str(error):
            raise
        time.sleep(0.1)  # the other rank may still write
    return {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.json")}, returned


DEFAULT = (skipped, deadlocked, works)


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, dict[int, dict[str, Any]], list[str]]]:
    """All scenes at once: they wait most of the time."""
    folders = {body: tmp_path_factory.mktemp(body.__name__) for body in DEFAULT}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        running = {body: pool.submit(ended, body, folder) for body, folder in folders.items()}
        return {body.__name__: (folders[body], *future.result()) for body, future in running.items()}


def test_mismatched_collectives_are_named_with_both(results):
    folder, told, returned = results["skipped"]
    assert returned == []
    assert told.keys() == {0, 1}
    assert told[0]["message"] == told[1]["message"]
    assert [told[rank]["tells"] for rank in (0, 1)] == [True, False]
    assert told[0]["code"] == "RUN_HANG"
    for operation in ("all_reduce [3]", "broadcast [5]"):
        assert operation in told[0]["message"]
    assert "the ranks do not call the same collectives" in told[0]["message"]
    assert "not complete: all_reduce [3]" in (folder / "logs" / "hang-rank-0.txt").read_text()


def test_a_deadlock_in_python_is_named_with_its_place(results):
    folder, told, _ = results["deadlocked"]
    assert "rank 1 has made no progress for 1 s in step 3, and is in no collective" in told[0]["message"]
    assert f"{__file__}:" in told[0]["message"]
    assert "in deadlocked" in told[0]["message"]
    assert "Rank 0 waits in barrier" in told[0]["message"]
    assert "in deadlocked" in (folder / "logs" / "hang-rank-1.txt").read_text()


def test_work_that_may_take_any_time_is_not_ended(results):
    folder, told, returned = results["works"]
    assert told == {}
    assert returned == ["passed", "passed"]
    assert list((folder / "logs").iterdir()) == []


@pytest.mark.full
@pytest.mark.parametrize("body", [stalled, stopped, slow_step, locked], ids=lambda body: body.__name__)
def test_other_scenes(body, tmp_path):
    told, returned = ended(body, tmp_path)
    if body is slow_step:
        assert returned == ["passed", "passed"]
        return
    if body is stopped:
        assert told.keys() == {0}
        assert "rank 1 has not responded" in told[0]["message"]
        assert "is stopped (SIGSTOP" in told[0]["message"]
        return
    if body is locked:
        assert told.keys() == {0}
        assert "rank 1 has not responded" in told[0]["message"]
        assert f"its Python code is at {__file__}:" in told[0]["message"]
        assert "in locked: a library holds Python's lock" in told[0]["message"]
        assert "in locked" in (tmp_path / "logs" / "hang-rank-1.txt").read_text()
        return
    assert "in prefetch, which waits for" in told[0]["message"]
    assert "in source" in told[0]["message"]
