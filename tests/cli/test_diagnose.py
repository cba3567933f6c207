"""`toolkit diagnose` in real processes on the CPU, by itself and as a launcher's rank."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from quick_python import quick_python
from ranks import QUICK, free_port

from toolkit.cli.app import main
from toolkit.cli.diagnose import show
from toolkit.topology import Grid, place

NO_CARDS = {**os.environ, **QUICK, "CUDA_VISIBLE_DEVICES": ""}


def toolkit(*arguments: str, folder: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [quick_python(), "-m", "toolkit", *arguments]
    environment = NO_CARDS | variables
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)


@pytest.mark.gloo
def test_sizes_without_cards_are_checked_on_cpu() -> None:
    done = toolkit("diagnose", "--tp", "2", "--gpus-per-node", "2", "--timeout", "200", "--json")
    assert done.returncode == 0, done.stderr
    assert "0 cards for 2 ranks: checking on CPU" in done.stderr
    found = json.loads(done.stdout)
    assert found["grid"] == {"pp": 1, "dp": 1, "tp": 2}
    check = found["check"]
    assert (check["passed"], check["backend"], check["waiting"], check["problems"]) == (True, "gloo", [], [])
    assert list(check["kinds"]) == ["tp", "model", "stage", "world"]
    assert {"join", "all-reduce", "barrier"} < set(check["operations"])
    assert check["kinds"]["tp"] == {
        "passed": True,
        "seconds": check["kinds"]["tp"]["seconds"],
        "bus_gb_per_second": None,
    }


@pytest.mark.gloo
def test_topology_check_is_the_same_and_a_job_on_cpu_leaves_its_output_folder_alone(tmp_path: Path) -> None:
    job = "model: quickstart-llama\ncluster: {gpu: cpu, gpus_per_node: 2}\ntrain: {output_dir: runs/mine}\n"
    (tmp_path / "job.yaml").write_text(job)
    done = toolkit("topology", "job.yaml", "--check", "--timeout", "200", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "checking on CPU" not in done.stderr
    rows = {line.split()[0]: line.split()[1:5] for line in done.stdout.splitlines() if line[:1] == " " and line.split()}
    assert rows["dp"] == ["1", "2", "yes", "ok"]
    assert "every group works over gloo: join, all-reduce" in done.stdout
    assert not (tmp_path / "runs").exists()


@pytest.mark.gloo
def test_a_launchers_rank_that_is_alone_says_whom_it_misses() -> None:
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = toolkit("diagnose", "--timeout", "2", "--json", **place, **address)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["grid"] == {"pp": 1, "dp": 2, "tp": 1}, "the sizes are the launcher's"
    (wait,) = found["check"]["waiting"]
    assert wait == {
        "kind": "world",
        "operation": "start",
        "group": [0, 1],
        "waiting": [0],
        "missing": [{"rank": 1, "place": "not started"}],
    }
    assert [problem["code"] for problem in found["check"]["problems"]] == ["GROUP_HANG"]


def test_wrong_values_and_bandwidth_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    kind = {"passed": True, "seconds": 0.5, "bus_gb_per_second": 123.44}
    problem = {"code": "GROUP_RESULT", "message": "broadcast gave rank 1 [0], not [1]", "fix": "Compare", "key": ""}
    result = {
        "passed": False,
        "backend": "nccl",
        "operations": ["broadcast"],
        "kinds": {"tp": kind, "world": kind | {"passed": False}},
        "waiting": [],
        "problems": [problem],
    }
    show(place(Grid(tp=2), num_nodes=1, gpus_per_node=2), result, as_json=False)
    captured = capsys.readouterr()
    rows = [line.split() for line in captured.out.splitlines()]
    assert ["tp", "1", "2", "yes", "ok", "0.50", "123.4"] in rows
    assert ["world", "1", "2", "yes", "wrong", "0.50", "123.4"] in rows
    assert "works" not in captured.out
    assert "broadcast gave rank 1 [0], not [1]. Compare. [GROUP_RESULT]" in captured.err


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (("topology", "--tp", "2", "--timeout", "5"), 2, "requires --check"),
        (("diagnose", "--tp", "2", "--timeout", "0"), 2, "--timeout"),
        (("diagnose", "--tp", "2", "--nodes", "2", "--gpus-per-node", "2"), 3, "LAUNCH_NODES"),
        (("topology", "--tp", "2", "--nodes", "2", "--gpus-per-node", "2", "--check"), 3, "LAUNCH_NODES"),
        (("diagnose",), 2, "give a job, or sizes"),
        (("topology", "--check"), 2, "give a job, or sizes"),
        (("diagnose", "--set", "parallel.pipeline=2"), 2, "needs a JOB"),
        (("diagnose", "job.yaml", "--tp", "2"), 2, "would be ignored"),
    ],
)
def test_checks_that_cannot_be(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, part: str
) -> None:
    assert main([*arguments]) == code
    assert part in capsys.readouterr().err
