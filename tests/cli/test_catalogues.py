"""`toolkit gpus`, `toolkit models` and `toolkit topology`."""

from __future__ import annotations

import json

import pytest

from toolkit.catalog.gpus import load_catalogue
from toolkit.catalog.models import model_names
from toolkit.cli.app import main


def run(capsys, *arguments):
    assert main(arguments) == 0
    return capsys.readouterr().out


def test_all_gpus(capsys):
    shown = run(capsys, "gpus").splitlines()
    for name in load_catalogue():
        assert sum(line.split()[:1] == [name] for line in shown) == 1
    row = next(line for line in shown if "h100-sxm-80gb" in line)
    assert row.split()[1:] == ["hopper", "79.18", "3350", "989", "989", "450", "nvlink", "2048"]


def test_one_gpu_gives_each_figure_with_its_source(capsys):
    shown = run(capsys, "gpus", "RTX 4090 24GB")
    gpu = load_catalogue()["rtx-4090-24gb"]
    for source in set(gpu.sources.values()):
        assert source in shown
    assert "23.52 GiB" in shown
    assert "165.2 TFLOP/s" in shown


def test_the_cpu_has_no_figures(capsys):
    assert "gloo" in run(capsys, "gpus", "cpu")


def test_gpus_as_json(capsys):
    found = json.loads(run(capsys, "gpus", "--json"))["gpus"]
    assert [gpu["name"] for gpu in found] == list(load_catalogue())
    (one,) = json.loads(run(capsys, "gpus", "h100-sxm-80gb", "--json"))["gpus"]
    assert one["memory_bytes"] == load_catalogue()["h100-sxm-80gb"].memory_bytes


def test_models(capsys):
    shown = run(capsys, "models")
    for name in model_names():
        assert f" {name} " in shown
    row = next(line for line in shown.splitlines() if " llama-3.1-8b " in line)
    assert row.split() == [
        *("llama-3.1-8b", "8.03", "B", "32", "4096", "32", "8", "–", "128256", "131072", "meta-llama/Llama-3.1-8B")
    ]


def test_one_model(capsys):
    shown = run(capsys, "models", "mixtral-8x7b")
    assert "mistralai/Mixtral-8x7B-v0.1" in shown
    assert "num_local_experts: 8" in shown
    (one,) = json.loads(run(capsys, "models", "mixtral-8x7b", "--json"))["models"]
    assert (one["num_parameters"], one["config"]["model_type"]) == (46_702_792_704, "mixtral")


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
