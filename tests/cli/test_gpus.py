"""`toolkit gpus`: the catalogue, one card with its sources, JSON."""

from __future__ import annotations

import json

from toolkit.catalog.gpus import load_catalogue
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
