"""A run ends within seconds and names the rank that is stopped or killed, and goes on while one only takes long.

Over NCCL on two cards; where there is one, on that as two nodes, which have their own host names and talk over sockets; and over gloo,
without a card, as the same two nodes.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from cards import card
from machines import stand_in_for_ssh, under_the_name, why_no_name
from ranks import ONE_CARD, QUICK
from train_jobs import start_toolkit, wait_for_step, write_inputs, write_job

CARDS = torch.cuda.device_count()
NEEDS_NAME = pytest.mark.skipif(bool(why_no_name()), reason=why_no_name())
PLACES = {
    "two-cards": (pytest.mark.gpu, pytest.mark.skipif(CARDS < 2, reason="needs two CUDA devices")),
    "one-card": (
        pytest.mark.gpu,
        pytest.mark.skipif(
            CARDS != 1 or card() is None, reason="needs one CUDA device that computes in bf16; two run as two cards"
        ),
        NEEDS_NAME,
    ),
    "gloo": (pytest.mark.gloo, pytest.mark.full, NEEDS_NAME),
}
PARALLEL: dict[str, dict[str, Any]] = {
    "zero-2": {"zero_stage": 2},
    "zero-3": {"zero_stage": 3},
    "pp": {"pipeline": 2, "zero_stage": 1},
    "tp": {"tensor": 2, "zero_stage": 1},
}
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
HANG_MINUTES = 0.2
SLOW_SAVE = f"""
import time
class Slow:
    def on_save(self, run, folder):
        time.sleep({1.5 * 60 * HANG_MINUTES} if run.world.is_main else 0)
"""


def at(place: str, *values: Any) -> Any:
    return pytest.param(place, *values, marks=PLACES[place], id="-".join(map(str, (place, *values))))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(
        tmp_path_factory.mktemp("lost-ranks"), architecture="llama", num_key_value_heads=2, head_dim=64, **SIZES
    )


@contextmanager
def started(
    root: Path, tmp_path: Path, place: str, *, parallel: str = "zero-2", **train: Any
) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """The folder of a run of two ranks and its process, which ends with the `with` block if it has not ended before."""
    environment: dict[str, str] = {**os.environ, **QUICK}
    words: list[str] = []
    cluster: dict[str, Any] = {"gpu": card(), "gpus_per_node": 2}
    if place != "two-cards":
        words = ["--hosts", "localhost,node1"]
        cluster = {"gpu": "cpu" if place == "gloo" else card(), "nodes": 2, "gpus_per_node": 1}
        second = under_the_name("node1", ["env", "NCCL_HOSTID=node1"])
        environment |= ONE_CARD | {"MASTER_ADDR": "127.0.0.1", "PATH": stand_in_for_ssh(tmp_path, {"node1": second})}
    job = write_job(root, tmp_path.name, parallel=PARALLEL[parallel], cluster=cluster, train=train)
    process = start_toolkit(root, "train", job, "--as-is", *words, python=sys.executable, env=environment)
    try:
        yield root / tmp_path.name, process
    finally:
        if process.poll() is None:
            for each in (*psutil.Process(process.pid).children(recursive=True), process):
                with suppress(psutil.NoSuchProcess):
                    each.kill()
            process.communicate()


def workers_of(process: subprocess.Popen[str]) -> dict[str, psutil.Process]:
    """The processes of both ranks, without those that they have started."""
    found: dict[str, psutil.Process] = {}
    for child in psutil.Process(process.pid).children(recursive=True):  # parents before their children
        try:
            found.setdefault(child.environ().get("RANK", ""), child)
        except (psutil.Error, OSError):
            continue  # it has just ended
    return {rank: found[rank] for rank in "01"}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("place", "parallel"),
    [at(place, parallel) for place in PLACES for parallel in ("zero-2", "pp") if (place, parallel) != ("gloo", "pp")],
)
def test_a_killed_rank_ends_the_run_within_seconds_and_is_named(
    root: Path, tmp_path: Path, place: str, parallel: str
) -> None:
    train = {"max_steps": 100_000, "save_steps": 100_000}
    with started(root, tmp_path, place, parallel=parallel, **train) as (folder, process):
        wait_for_step(folder, 3, process, seconds=200)
        workers_of(process)["1"].kill()
        began = time.monotonic()
        out, err = process.communicate(timeout=120)
    assert time.monotonic() - began < 20, err
    assert process.returncode not in (0, None)
    assert "rank 1" in out + err


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("place", "parallel", "stopped"),
    [
        *(at("two-cards", *case) for case in itertools.product(PARALLEL, (1, 0))),
        *(at("one-card", *case) for case in (("zero-2", 1), ("zero-2", 0), ("zero-3", 1), ("pp", 1))),
        *(at("gloo", "zero-2", stopped) for stopped in (1, 0)),
    ],
)
def test_a_stopped_rank_ends_the_run_and_is_named(
    root: Path, tmp_path: Path, place: str, parallel: str, stopped: int
) -> None:
    train = {"max_steps": 100_000, "save_steps": 5, "save_total_limit": 2, "hang_timeout_minutes": HANG_MINUTES}
    with started(root, tmp_path, place, parallel=parallel, **train) as (folder, process):
        wait_for_step(folder, 8, process, seconds=200)
        workers = workers_of(process)
        victim = workers[str(stopped)]
        victim.suspend()
        began = time.monotonic()
        _, err = process.communicate(timeout=200)
    assert time.monotonic() - began < 60 * HANG_MINUTES + 10, err
    assert process.returncode == 3, err
    assert "[RUN_HANG]" in err
    [told] = [line for line in err.splitlines() if "[RUN_HANG]" in line]
    assert f"rank {stopped}" in told
    if place == "two-cards":
        assert f"process {victim.pid} " in told
        assert "is stopped (SIGSTOP" in told
        assert "checkpoint-" in err.splitlines()[-1]
    else:  # a node knows nothing of another's processes, and of rank 0's, which hosts the store, not even the number
        assert "has not responded" in told
        assert stopped == 0 or f"process {victim.pid} on node1" in told
        assert f"--resume_from_checkpoint {folder}/checkpoint-" in err
    assert not any(worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE for worker in workers.values())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("place", [at(place) for place in PLACES])
def test_a_long_save_while_the_other_rank_waits_is_not_ended(root: Path, tmp_path: Path, place: str) -> None:
    (root / "slow_save.py").write_text(SLOW_SAVE)
    train = {"save_steps": 4, "hang_timeout_minutes": HANG_MINUTES, "callbacks": ["slow_save:Slow"]}
    with started(root, tmp_path, place, **train) as (folder, process):
        _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err[-4000:]
    assert not list((folder / "logs").glob("hang-*"))
