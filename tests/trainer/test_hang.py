"""`toolkit train` with a rank that is stopped, deadlocked or busy: all ranks end with its name, or none does."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from quick_python import child_with, stood_for
from ranks import QUICK, free_port
from train_jobs import hears_interrupts, start_toolkit, wait_for_step, write_inputs, write_job

from toolkit.cli.options import read_plan
from toolkit.errors import RunError
from toolkit.trainer.hang import last_words

pytestmark = pytest.mark.gloo
SECONDS = 1.8
HOOKS = """
import threading, time

class Slow:
    '''Takes longer than is allowed in a save, on one rank, and in an evaluation, on both.'''
    def on_save(self, run, folder):
        time.sleep({seconds} if run.world.is_main else 0)
    def on_evaluation(self, run, loss):
        time.sleep({seconds})

class Deadlocked:
    def on_step_end(self, run, loss):
        if run.step_count == 3 and not run.world.is_main:
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = write_inputs(tmp_path_factory.mktemp("hang"))
    (root / "hang_hooks.py").write_text(HOOKS.format(seconds=1.5 * SECONDS))
    return root


def job_of(root: Path, name: str, **train: object) -> Path:
    values = {"max_steps": 100_000, "save_steps": 10, "save_total_limit": 2, "hang_timeout_minutes": SECONDS / 60}
    return write_job(root, name, train=values | train)


def start(root: Path, job: Path, *, torchrun: bool) -> subprocess.Popen[str]:
    if not torchrun:
        return start_toolkit(root, "train", job, "--json")
    launcher = ["torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    return subprocess.Popen(
        [sys.executable, "-m", *launcher, "-m", "toolkit", "train", str(job)],
        cwd=root,
        env={**os.environ, **QUICK},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hears_interrupts,
    )


def ranks_of(process: subprocess.Popen[str], *, torchrun: bool) -> list[psutil.Process]:
    """The processes of both ranks."""
    found = [child_with(process.pid, RANK=rank) for rank in "01"]
    return found if torchrun else [stood_for(child.pid) for child in found]


@pytest.mark.parametrize(
    ("stopped", "torchrun"),
    [(1, False), *(pytest.param(*values, marks=pytest.mark.full) for values in ((0, False), (1, True), (0, True)))],
)
def test_a_stopped_rank_is_named_and_nothing_runs_on(root, stopped, torchrun):
    name = f"stopped-{stopped}-{torchrun}"
    process = start(root, job_of(root, name), torchrun=torchrun)
    wait_for_step(root / name, 12, process)
    ranks = ranks_of(process, torchrun=torchrun)
    ranks[stopped].send_signal(signal.SIGSTOP)
    at = time.monotonic()
    out, err = process.communicate(timeout=100)
    assert time.monotonic() - at < SECONDS + 15, "a few seconds on an idle machine"
    assert process.returncode == (1 if torchrun else 3), err
    assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)
    message = err if torchrun else json.loads(out)["failure"]["problems"][0]["message"]
    assert f"rank {stopped}" in message
    assert f"process {ranks[stopped].pid} " in message
    assert "is stopped (SIGSTOP" in message
    assert re.search(r"all_(reduce|gather) \[", message)
    assert "RUN_HANG" in (err if torchrun else out)
    assert "not complete: all_" in (root / name / "logs" / f"hang-rank-{1 - stopped}.txt").read_text()
    if torchrun:
        assert "Go on with torchrun as before, and this command:" in err
        assert f"toolkit train {root / name}.yaml --resume_from_checkpoint {root / name}/checkpoint-" in err
    else:
        assert "checkpoint-" in json.loads(out)["next_command"]


@pytest.mark.full
def test_ranks_that_are_stopped_before_they_join_are_named(root):
    process = start(root, job_of(root, "early"), torchrun=False)
    ranks: list[psutil.Process] = []
    give_up = time.monotonic() + 100
    while not ranks and time.monotonic() < give_up:
        with suppress(ValueError):  # not started yet
            ranks = [child_with(process.pid, RANK=rank) for rank in "01"]
    for rank in ranks:
        rank.suspend()
    out, err = process.communicate(timeout=100)
    assert process.returncode == 3, err
    [problem] = json.loads(out)["failure"]["problems"]
    assert problem["code"] == "RUN_HANG"
    assert all(f"process {rank.pid} of rank {number}" in problem["message"] for number, rank in enumerate(ranks))
    assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)


def test_one_rank_tells_a_script_of_the_users_how_to_go_on(root, capsys):
    """Under another launcher, where `tk.train` is called in Python."""
    plan = read_plan(job_of(root, "script"), [])
    error = RunError.of(
        code="RUN_HANG", key="train.hang_timeout_minutes", message="rank 1 is stopped", fix="Look there"
    )
    tell = last_words(plan, log_dir=None, go_on=None)
    assert tell(error, False) == 3
    assert capsys.readouterr().err == ""
    assert tell(error, True) == 3
    told = capsys.readouterr().err
    assert "rank 1 is stopped. Look there. [RUN_HANG]" in told
    assert "Nothing was saved yet" in told


@pytest.mark.full
def test_a_stopped_rank_of_another_node_is_named(root):
    """Two agents of torchrun, as on two machines, each with a rank."""
    values = {"max_steps": 100_000, "save_steps": 10, "save_total_limit": 2, "hang_timeout_minutes": SECONDS / 60}
    job = write_job(root, "nodes", train=values, cluster={"nodes": 2, "gpus_per_node": 1})
    meet = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    command = [sys.executable, "-m", "torch.distributed.run", *meet, "-m", "toolkit", "train", str(job)]
    agents = [
        subprocess.Popen(
            command, cwd=root, env={**os.environ, **QUICK}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    wait_for_step(root / "nodes", 12, agents[0])
    rank = next(
        child for agent in agents for child in psutil.Process(agent.pid).children() if child.environ()["RANK"] == "1"
    )
    rank.send_signal(signal.SIGSTOP)
    ends = [agent.communicate(timeout=60) for agent in agents]
    assert [agent.returncode for agent in agents] == [1, 1]
    told = next(err for _, err in ends if "[RUN_HANG]" in err)
    assert "rank 1 has not responded" in told
    assert f"process {rank.pid} on " in told
    assert not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE


@pytest.mark.full
def test_a_deadlock_in_a_hook_is_named_with_its_line(root):
    process = start(root, job_of(root, "deadlock", callbacks=["hang_hooks:Deadlocked"]), torchrun=False)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 3, err
    message = json.loads(out)["failure"]["problems"][0]["message"]
    assert "rank 1 has made no progress" in message
    assert "hang_hooks.py:16 in on_step_end" in message


@pytest.mark.full
def test_long_saves_and_evaluations_are_not_ended(root):
    job = write_job(
        root,
        "slow",
        train={"max_steps": 4, "save_steps": 2, "eval_steps": 2, "callbacks": ["hang_hooks:Slow"]}
        | {"hang_timeout_minutes": SECONDS / 60},
        data={"validation_fraction": 0.2},
    )
    process = start(root, job, torchrun=False)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, (out, err)
    assert not list((root / "slow" / "logs").glob("hang-*"))
