"""Work of one rank may take longer than the groups' timeout; ranks that die meanwhile are missed at once."""

from __future__ import annotations

import os
import subprocess
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from quick_python import quick_python
from ranks import ENVIRONMENT, free_port, run_distributed

from toolkit.distributed import heartbeat as patience
from toolkit.distributed.heartbeat import run_with_heartbeat
from toolkit.distributed.world import init_world
from toolkit.errors import DataError, RunError
from toolkit.topology.grid import Grid

RANKS = 3
TIMEOUT_SECONDS = 2.0
LOST_SECONDS = 2.0


def slow(seconds: float, value: Any) -> Any:
    time.sleep(seconds)
    return value


def fail() -> None:
    raise DataError.of(code="DATA_X", message="of rank 0", fix="mend")


def scenes(rank: int, meet: str) -> dict[str, Any]:
    patience.PULSE_SECONDS = 0.2
    dist.destroy_process_group()
    world = init_world(Grid(pp=1, dp=RANKS, tp=1), backend="gloo", timeout=timedelta(seconds=TIMEOUT_SECONDS))
    found: dict[str, Any] = {}
    work = 3 * TIMEOUT_SECONDS if rank == 0 else 0.0
    # Rank 0 is silent for a fraction of a second at a time, or more on a busy machine, and works for longer than that.
    found["slow"] = run_with_heartbeat(world, lambda: slow(work, rank), lost_seconds=4.5)
    try:
        run_with_heartbeat(world, lambda: fail() if rank == 0 else None)
    except DataError as error:
        found["failed"] = error.codes
    if rank != 1:  # which is alive, and never comes
        try:
            run_with_heartbeat(world, lambda: None, lost_seconds=LOST_SECONDS)
        except RunError as error:
            found["lost"] = [(problem.code, problem.message) for problem in error.problems]
    # `run_distributed` ends with a barrier, which is not to be that of groups so impatient.
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=RANKS)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_distributed(scenes, RANKS, str(tmp_path_factory.mktemp("meet") / "store"))


@pytest.mark.gloo
def test_work_may_outlast_the_timeout_of_the_groups(found: list[dict[str, Any]]) -> None:
    assert [result["slow"] for result in found] == [0, 1, 2]


@pytest.mark.gloo
def test_an_error_of_one_is_raised_on_all(found: list[dict[str, Any]]) -> None:
    assert [result["failed"] for result in found] == [("DATA_X",)] * RANKS


@pytest.mark.gloo
def test_a_rank_that_gives_no_sign_is_lost(found: list[dict[str, Any]]) -> None:
    for result in (found[0], found[2]):
        ((code, message),) = result["lost"]
        assert code == "RANK_LOST"
        assert message == "rank 1 has not responded for 2 s, so this rank ends too"


WORKER = """
import os, sys, threading, time
from toolkit.distributed.heartbeat import run_with_heartbeat
from toolkit.distributed.world import init_world
from toolkit.topology.grid import Grid
world = init_world(Grid(pp=1, dp=2, tp=1), backend="gloo")
print("connected", flush=True)
run_with_heartbeat(world, (lambda: time.sleep(600)) if world.is_main else (lambda: None))
"""


@pytest.mark.gloo
def test_the_death_of_the_rank_that_works_ends_the_others() -> None:
    """Without a launcher that would end them."""
    environment = {
        **os.environ,
        **ENVIRONMENT,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    ranks = [
        subprocess.Popen(
            [quick_python(), "-c", WORKER],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in ranks:
        assert process.stdout is not None
        assert process.stdout.readline() == "connected\n", process.communicate()
    time.sleep(0.5)
    ranks[0].kill()
    killed = time.monotonic()
    _, shown = ranks[1].communicate(timeout=200)
    assert time.monotonic() - killed < 100, "long before a rank counts as lost by its silence"
    assert ranks[1].returncode != 0
    assert "[RANK_LOST]" in shown
    ranks[0].communicate()
