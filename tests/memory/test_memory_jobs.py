"""Each job in configs/jobs fits the cluster that it names, and says no other host memory than its estimate."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from toolkit.config.job import Job
from toolkit.memory.estimate import estimate
from toolkit.planning.resolve import resolve
from toolkit.units import GIB

ROOT = Path(__file__).parents[2]
JOBS = sorted((ROOT / "configs" / "jobs").glob("*.yaml"))
FIGURE = re.compile(r"a node needs ([\d.]+) (GiB|TiB)")


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_a_job_fits_and_its_header_agrees(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    report = estimate(resolve(Job.from_yaml(path)))
    assert report.fits, path.name
    header = "\n".join(line for line in path.read_text().splitlines() if line.startswith("#"))
    figures = [float(number) * GIB * (1024 if unit == "TiB" else 1) for number, unit in FIGURE.findall(header)]
    assert len(figures) == len(re.findall(r"GiB|TiB", header)), "no other figure stands in a header"
    for figure in figures:
        assert report.host.bytes_per_node == pytest.approx(figure, rel=0.02)
