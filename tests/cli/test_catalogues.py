"""`toolkit gpus`, `toolkit models` and `toolkit topology`."""

from __future__ import annotations

import json

import pytest

from toolkit.cli.app import main


def run(capsys, *arguments):
    assert main(arguments) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code"), [(("gpus", "h1000"), "GPU_UNKNOWN"), (("models", "lama-3.1-8b"), "MODEL_NOT_FOUND")]
)
def test_an_unknown_name(capsys, arguments, code):
    assert main(arguments) == 2
    assert code in capsys.readouterr().err


def test_topology_of_sizes(capsys):
    shown = run(capsys, "topology", "--pp", "2", "--tp", "2", "--nodes", "2", "--gpus-per-node", "4")
    rows = [line.split() for line in shown.splitlines() if line.strip()[:1].isdigit()]
    assert rows[5] == ["5", "1", "1", "1", "0", "1", "4-5", "5,7", "1,5"]
    assert len(rows) == 8
    assert "tp: 4 groups of 2, inside a node" in shown
    assert "pp: 4 groups of 2, over up to 2 nodes" in shown


@pytest.mark.parametrize(
    ("sizes", "grid", "per_node"),
    [
        (("--dp", "4"), {"pp": 1, "dp": 4, "tp": 1}, 4),
        (("--tp", "2", "--gpus-per-node", "8"), {"pp": 1, "dp": 4, "tp": 2}, 8),
        (("--pp", "2", "--dp", "2", "--nodes", "2"), {"pp": 2, "dp": 2, "tp": 1}, 2),
    ],
)
def test_sizes_that_are_left_out(capsys, sizes, grid, per_node):
    found = json.loads(run(capsys, "topology", *sizes, "--json"))
    assert (found["grid"], found["gpus_per_node"]) == (grid, per_node)


def test_topology_of_a_job(capsys, tmp_path):
    job = tmp_path / "job.yaml"
    job.write_text("model: quickstart-llama\ncluster: {gpu: cpu, gpus_per_node: 4}\nparallel: {tensor: 2}\n")
    found = json.loads(run(capsys, "topology", str(job), "--set", "cluster.nodes=2", "--json"))
    assert (found["grid"], found["world_size"]) == ({"pp": 1, "dp": 4, "tp": 2}, 8)
    assert found["groups"]["tp"]["ranks"][0] == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ((), "give a job, or sizes"),
        (("job.yaml", "--tp", "2"), "would be ignored"),
        (("--tp", "2", "--set", "train.seed=1"), "needs a JOB"),
        (("--tp", "3", "--nodes", "2"), "do not divide"),
        (("--tp", "2", "--dp", "2", "--gpus-per-node", "2"), "GRID_WORLD"),
        (("--tp", "4", "--nodes", "2", "--gpus-per-node", "2"), "TP_SPANS_NODES"),
        (("--tp", "0"), "--tp"),
    ],
)
def test_topologies_that_cannot_be(capsys, arguments, part):
    assert main(["topology", *arguments]) == 2
    assert part in capsys.readouterr().err
