"""`toolkit train` on two machines by torchrun: found by their names, one of them lost, and gone on without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from machines import Machine, two_machines, why_none
from quick_python import quick_python
from ranks import QUICK, free_port
from train_jobs import curve, hears_interrupts, records, run_toolkit, wait_for_step, write_inputs, write_job

from toolkit.checkpoint.manifest import hash_files, list_files, write_manifest
from toolkit.checkpoint.state import State
from toolkit.cli.elastic import after_restart, agents_code, begin_in, forget_earlier

needs_machines = pytest.mark.skipif(bool(why_none()), reason=why_none())
PORT = 29400
SAME_BATCH = ("--set", "train.gradient_accumulation_steps=4", "--no-export")


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def nodes(tmp_path) -> Iterator[tuple[Machine, Machine]]:
    with two_machines(tmp_path) as made:
        yield made


# By default they wait 30 s for further nodes once one is there, and take one for lost after 15 s of silence. The first one there says how
# long: node1, which waits until the other has come, however busy the machine is. After the loss it is node0, which waits for nobody.
UNTIL_BOTH, ALONE = (
    f"--rdzv-conf=is_host=false,last_call_timeout={last_call},keep_alive_interval=1,keep_alive_max_attempt=5,join_timeout=300"
    for last_call in (300, 1)
)
# The store of the agents on node0, in a process of its own, which says when the first of them has joined.
STORE = f"""
import time
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
agents = C10dRendezvousBackend(TCPStore("node0", {PORT}, is_master=True, wait_for_workers=False), "two")
while agents.get_state() is None:
    time.sleep(0.02)
print("joined", flush=True)
time.sleep(3000)
"""
PATIENTLY = "--rdzv-conf=last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=15,join_timeout=60"


def torchrun(
    root: Path, node: Machine, *arguments: object, sizes: tuple[str, ...], real: bool = False
) -> subprocess.Popen[str]:
    """`toolkit ARGUMENTS` under torchrun, one rank a node; its ranks are forked, and it is itself unless `real`."""
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"node0:{PORT}", "--rdzv-id", "two", "--nproc-per-node", "1"]
    run = ["-m", "torch.distributed.run", *sizes, *where, "-m", "toolkit", *map(str, arguments)]
    return subprocess.Popen(
        node.command([sys.executable, *run]) if real else [str(quick_python()), *run],
        cwd=root,
        env={
            **os.environ,
            **QUICK,
            **node.environment(),
            "PYTHON_EXEC": str(quick_python()),
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=hears_interrupts,
    )


@contextmanager
def store_of_agents(node: Machine) -> Iterator[Callable[[], None]]:
    """The store of torchrun's agents on a node, and a function that waits until one of them has joined."""
    command, environment = [quick_python(), "-c", STORE], {**os.environ, **QUICK, **node.environment()}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as store:
        assert store.stdout is not None

        def until_joined() -> None:
            assert store.stdout.readline() == "joined\n"

        yield until_joined
        store.kill()


def lost_at_step_9(folder: Path, node: Machine, first: subprocess.Popen[str], second: subprocess.Popen[str]) -> str:
    """Lose the second's node, and return what the first one shows until it has ended well."""
    wait_for_step(folder, 4, first)
    running = (
        node.processes()
    )  # before the step at which they end: on a busy machine a list takes as long as many steps
    wait_for_step(folder, 9, first)
    node.power_off(running)
    shown, _ = first.communicate(timeout=300)
    second.communicate(timeout=60)
    assert first.returncode == 0, shown
    assert second.returncode != 0
    return shown


def job_for_two(root: Path, name: str, *, steps: int) -> Path:
    return write_job(
        root,
        name,
        cluster={"nodes": 2, "gpus_per_node": 1},
        train={"max_steps": steps, "save_steps": 4, "save_total_limit": 2},
    )


@needs_machines
def test_a_run_goes_on_without_a_node_that_is_lost(root, nodes):
    """Its ranks are found by their nodes' names over their own network; the lost one is named; the global batch stays."""
    job = job_for_two(root, "elastic", steps=120)
    with store_of_agents(nodes[0]) as until_joined:
        arguments, sizes = ("train", job, "--elastic", "--no-export"), ("--nnodes", "1:2", "--max-restarts", "2")
        second = torchrun(root, nodes[1], *arguments, sizes=(*sizes, UNTIL_BOTH))
        until_joined()
        first = torchrun(root, nodes[0], *arguments, sizes=(*sizes, ALONE))
        shown = lost_at_step_9(root / "elastic", nodes[1], first, second)
    assert "the connection to node1 (rank 1) at 10.77.0.2 broke" in shown
    assert "[NODE_LOST]" in shown
    assert (
        "1 of 2 nodes are there; the global batch is kept: 8 = 2 micro × 2 accumulation × 2 data-parallel ranks"
        in shown
    )
    assert "rank 0 of 1" in shown
    found = records(root / "elastic")
    assert json.loads((root / "elastic" / ".torchelastic.json").read_text())["run"] == "two"
    assert sorted(curve(root / "elastic")) == list(range(1, 121))
    assert all(record["epoch"] == pytest.approx(record["step"] * 8 / 239) for record in found if "loss" in record)


@needs_machines
@pytest.mark.full
@pytest.mark.parametrize("lost", [0, 1])
def test_the_other_node_ends_and_names_the_lost_one(root, nodes, lost):
    """Node 0 has the ranks' store and the rendezvous of the agents."""
    name = f"lost-{lost}"
    job, other = job_for_two(root, name, steps=5000), 1 - lost
    sizes = ("--nnodes", "2", "--max-restarts", "0")
    processes = [torchrun(root, node, "train", job, sizes=sizes) for node in nodes]
    wait_for_step(root / name, 3, processes[0])
    nodes[lost].power_off()
    began = time.monotonic()
    shown, _ = processes[other].communicate(timeout=100)
    assert time.monotonic() - began < 30
    processes[lost].communicate(timeout=10)
    assert processes[other].returncode not in (0, None), shown
    assert f"the connection to node{lost} (rank {lost}) at 10.77.0.{lost + 1} broke" in shown, shown


@needs_machines
@pytest.mark.full
def test_a_node_that_comes_back_takes_part(tmp_path, nodes):
    """From one node to two and the same losses as on one: without dropout, nothing but the order of additions differs."""
    root = write_inputs(tmp_path, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    job = job_for_two(root, "back", steps=400)
    sizes = ("--nnodes", "1:2", "--max-restarts", "3", PATIENTLY)
    first = torchrun(root, nodes[0], "train", job, "--elastic", "--no-export", sizes=sizes, real=True)
    wait_for_step(root / "back", 6, first)
    second = torchrun(root, nodes[1], "train", job, "--elastic", "--no-export", sizes=sizes, real=True)
    shown, _ = first.communicate(timeout=200)
    also, _ = second.communicate(timeout=100)
    assert (first.returncode, second.returncode) == (0, 0), shown + also
    assert "1 of 2 nodes are there" in shown
    assert "rank 0 of 2" in shown + also
    assert sorted(curve(root / "back")) == list(range(1, 401))
    alone = run_toolkit(
        root, "train", job_for_two(root, "alone", steps=400), "--stop-after=40", "--set", "cluster.nodes=1", *SAME_BATCH
    )
    assert alone.returncode == 0, alone.stderr
    ours, theirs = curve(root / "back"), curve(root / "alone")
    for step in range(1, 41):
        assert ours[step][0] == pytest.approx(theirs[step][0], rel=1e-3), step


@pytest.mark.full
def test_an_attempt_that_failed_early_leaves_the_deletion_to_the_next(tmp_path):
    root = write_inputs(tmp_path)
    job = write_job(root, "again", cluster={"gpus_per_node": 1}, train={"max_steps": 8, "save_steps": 4})
    done = run_toolkit(root, "train", job, "--no-export", "--stop-after=4")
    assert done.returncode == 0, done.stderr
    before = (root / "again" / "checkpoint-4" / "state.json").read_text()
    (root / "data.jsonl").rename(root / "away")
    run = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "1",
        "--max-restarts",
        "2",
        "--master-port",
        str(free_port()),
    ]
    command = [str(quick_python()), *run, "-m", "toolkit", "train", str(job), "--no-export", "--overwrite"]
    env = {**os.environ, **QUICK, "PYTHON_EXEC": str(quick_python())}
    process = subprocess.Popen(command, cwd=root, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    shown = []
    for line in process.stdout:
        shown.append(line)
        if "data.jsonl is not found" in line and (root / "away").exists():
            (root / "away").rename(root / "data.jsonl")
    assert process.wait() == 0, "".join(shown)
    assert "resumed" not in "".join(shown)
    assert sorted(curve(root / "again")) == list(range(1, 9))
    assert (root / "again" / "checkpoint-4" / "state.json").read_text() != before


def saved(folder: Path, step: int, at: float) -> None:
    checkpoint = folder / f"checkpoint-{step}"
    checkpoint.mkdir(parents=True, exist_ok=True)
    state = State(step=step, num_steps=9, zero_stage=0, world_size=1, train_batch_size=1, saved_at=at, versions={})
    state.save(checkpoint)
    write_manifest(checkpoint, hash_files(checkpoint, list_files(checkpoint)))


@pytest.fixture
def attempt(monkeypatch):
    """A function that makes this process a rank of one of torchrun's attempts."""

    def make(count: int, *, run: str = "none", logs: str = "none_a", agents: int = 1) -> None:
        values = {"RUN_ID": run, "RESTART_COUNT": str(count), "MAX_RESTARTS": "3"}
        values["ERROR_FILE"] = f"/tmp/torchelastic_x/{logs}/attempt_{count}/0/error.json"
        for name, value in values.items():
            monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
        monkeypatch.setenv("GROUP_WORLD_SIZE", str(agents))

    return make


def options(folder: Path, resume: str | None = None, *, overwrite: bool = False, elastic: bool = False):
    return after_restart(resume, overwrite=overwrite, elastic=elastic, output_dir=folder)


def test_the_users_options_hold_until_the_run_has_saved(tmp_path, attempt):
    saved(tmp_path, 8, at=1.0)  # of an earlier run, which is to be deleted, or gone back from
    attempt(1)
    assert options(tmp_path, overwrite=True) == (None, True), "the first attempt failed before it deleted anything"
    assert options(tmp_path, "other/checkpoint-4") == ("other/checkpoint-4", False)
    assert options(tmp_path) == (None, False), "the earlier run is still refused"
    attempt(0)
    begin_in(tmp_path, elastic=False)
    attempt(1)
    begin_in(tmp_path, elastic=False)
    assert options(tmp_path, "other/checkpoint-4") == ("other/checkpoint-4", False)
    assert options(tmp_path, overwrite=True) == (None, True)
    saved(tmp_path, 8, at=2.0)
    begin_in(tmp_path, elastic=False)
    assert options(tmp_path, "other/checkpoint-4") == ("auto", False)
    assert options(tmp_path, overwrite=True) == ("auto", False), "its own checkpoints would be deleted"


def test_the_note_of_an_earlier_run_counts_for_nothing(tmp_path, attempt):
    attempt(0, agents=2)
    begin_in(tmp_path, elastic=False)
    assert options(tmp_path, "other/checkpoint-4") == ("other/checkpoint-4", False)
    saved(tmp_path, 4, at=1.0)
    attempt(1, run="second", agents=2)
    assert options(tmp_path, overwrite=True) == (None, True)
    attempt(0, agents=2)  # by the same name
    forget_earlier(tmp_path, elastic=False)
    attempt(1, agents=2)
    assert options(tmp_path, overwrite=True) == (None, True)
    attempt(0)
    begin_in(tmp_path, elastic=False)
    saved(tmp_path, 8, at=2.0)
    attempt(1, logs="none_b")  # of another agent, whose first attempt got nowhere
    assert options(tmp_path, overwrite=True) == (None, True)
    attempt(1)
    assert options(tmp_path, overwrite=True) == ("auto", False)


def test_metrics_of_the_first_attempt_stop_no_other(tmp_path, attempt):
    attempt(0)
    begin_in(tmp_path, elastic=False)
    (tmp_path / "metrics.jsonl").touch()
    attempt(1)
    assert options(tmp_path) == ("auto", False)


def test_a_rank_that_torchrun_starts_again_goes_on(tmp_path, attempt):
    assert options(tmp_path, overwrite=True) == (None, True)
    assert options(tmp_path, elastic=True) == ("auto", False)
    assert agents_code(75) == 75
    begin_in(tmp_path, elastic=False)
    assert not list(tmp_path.iterdir()), "nobody starts it again"
    attempt(0)
    assert options(tmp_path, "checkpoint-4") == ("checkpoint-4", False)
    assert [agents_code(code) for code in (0, 3, 75, 130)] == [0, 3, 0, 130], "a run out of time would be started again"


def test_what_elastic_needs(root):
    job = job_for_two(root, "alone-elastic", steps=4)
    done = run_toolkit(root, "train", job, "--elastic")
    assert done.returncode == 2
    assert "no launcher started this process" in done.stderr
    assert "[ELASTIC]" in done.stderr
    done = run_toolkit(root, "train", job, "--elastic", "--overwrite")
    assert done.returncode == 2
    assert "--overwrite would delete" in done.stderr
    assert not (root / "alone-elastic").exists()
