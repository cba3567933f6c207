"""Runs that come back to their last commit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import run_distributed

import toolkit.compat.horovod as hvd
from toolkit.errors import CheckpointError

ROWS, BATCH = 32, 2
pytestmark = pytest.mark.gloo


def train(folder: str, *, fail_at: int | None) -> tuple[list[float], list[int], int]:
    """Trains a line on all rows, commits every second step, and returns its weights, the rows it took and the first step."""
    os.environ["TOOLKIT_HOROVOD_STATE"] = folder
    model = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(model.weight, float(hvd.rank()))  # rank 0's count
    torch.nn.init.constant_(model.bias, 1.0)
    adam = torch.optim.Adam(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(adam, model.named_parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    sampler = hvd.elastic.ElasticSampler(range(ROWS))
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, schedule=schedule, sampler=sampler, step=0)
    resets: list[int] = []
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])
    taken: list[int] = []
    first: list[int] = []

    @hvd.elastic.run
    def loop(state) -> None:
        first.append(state.step)
        rows = list(state.sampler)
        for start in range(0, len(rows), BATCH):
            if state.step == fail_at:
                raise RuntimeError("a fault")
            batch = rows[start : start + BATCH]
            x = torch.tensor(batch, dtype=torch.float32)[:, None] / ROWS
            state.optimizer.zero_grad()
            (state.model(x) - 3 * x).square().mean().backward()
            state.optimizer.step()
            state.schedule.step()
            state.sampler.record_batch(start // BATCH, BATCH)
            state.step += 1
            taken.extend(batch)
            if state.step % 2 == 0:
                state.commit()

    loop(state)
    assert resets == ([hvd.size()] if first[0] else [])
    return [float(value) for value in model.parameters()], taken, first[0]


def train_twice(rank: int, folder: str) -> tuple[list[float], list[float], list[int], int]:
    os.environ["HOROVOD_CYCLE_TIME"] = "0.1"
    hvd.init()
    whole, rows, first = train(f"{folder}/whole", fail_at=None)
    assert (first, len(rows)) == (0, ROWS // 2)
    hvd.barrier()
    assert list(Path(folder, "whole").iterdir()) == [], "a run that has ended leaves nothing"
    with pytest.raises(RuntimeError, match="a fault"):
        train(f"{folder}/again", fail_at=5)
    resumed, rows, first = train(f"{folder}/again", fail_at=None)
    with pytest.raises(RuntimeError, match="a fault"):
        train(f"{folder}/fewer", fail_at=5)
    hvd.shutdown()
    return whole, resumed, rows, first


def restored_in_memory(rank: int) -> None:
    hvd.init()
    model = torch.nn.Linear(1, 1)
    state = hvd.elastic.TorchState(model=model, epoch=1, names=["a"])
    state.sync()
    before = model.weight.detach().clone()
    state.epoch, state.names[0] = 7, "b"
    with torch.no_grad():
        model.weight.add_(1)
    state.restore()
    assert (state.epoch, state.names, torch.equal(model.weight, before)) == (1, ["a"], True)
    state.epoch = 2
    state.commit()
    state.epoch = 3
    state.restore()
    assert state.epoch == 2
    calls = []

    @hvd.elastic.run
    def changed(state) -> str:
        calls.append(state.epoch)
        state.epoch += 1
        if len(calls) == 1:
            raise hvd.elastic.HostsUpdatedInterrupt
        return "done"

    assert changed(state) == "done"
    assert calls == [2, 3]
    hvd.shutdown()


def run_all(rank: int, folder: str):
    restored_in_memory(rank)
    return train_twice(rank, folder)


def test_a_run_that_fails_goes_on_from_its_last_commit(tmp_path, monkeypatch):
    monkeypatch.delenv("TOOLKIT_HOROVOD_STATE", raising=False)
    ended = run_distributed(run_all, 2, str(tmp_path))
    for whole, resumed, rows, first in ended:
        assert resumed == whole
        assert (first, len(rows)) == (4, ROWS // 2 - 4 * BATCH)
    assert not set(ended[0][2]) & set(ended[1][2])
    # On another number of ranks, the rows that remain are taken once.
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TOOLKIT_HOROVOD_STATE", str(tmp_path / "fewer"))
    hvd.init()
    try:
        _, taken, first = train(str(tmp_path / "fewer"), fail_at=None)
        assert first == 4
        assert sorted(taken) == sorted([*ended[0][2], *ended[1][2]])
        (tmp_path / "fewer/horovod-state.pt").write_text("no state")
        with pytest.raises(CheckpointError, match=r"horovod-state.pt cannot be loaded.*HOROVOD_STATE"):
            train(str(tmp_path / "fewer"), fail_at=None)
        (tmp_path / "file").write_text("kept")
        with pytest.raises(CheckpointError, match=r"cannot be written.*HOROVOD_STATE"):
            train(str(tmp_path / "file"), fail_at=None)
    finally:
        hvd.shutdown()


SCRIPT = """
import os
import horovod.torch as hvd

hvd.init()
state = hvd.elastic.ObjectState(step=0)

@hvd.elastic.run
def loop(state):
    first = state.step
    while state.step < 6:
        if state.step == 3 and hvd.rank() == 1 and not first:
            os._exit(1)
        state.step += 1
        hvd.barrier()
        if state.step % 2 == 0:
            state.commit()
    print("rank", hvd.rank(), "went on from", first, flush=True)

loop(state)
"""


@pytest.mark.full
def test_torchrun_restarts_a_run_whose_rank_was_killed(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    done = subprocess.run(
        [*command, "-m", "toolkit.compat.horovod", "script.py"],
        cwd=tmp_path,
        env={
            **os.environ,
            "TOOLKIT_HOROVOD_STATE": str(tmp_path / "state"),
            "PYTHONPATH": str(Path(__file__).parents[3]),
        },
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 went on from 2", "rank 1 went on from 2"]
