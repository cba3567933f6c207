"""The estimate against this package's own runs on two H200 cards (`benchmarks/engine.py`)."""

import json
from pathlib import Path

import pytest

import toolkit as tk
from toolkit.memory.case import Case
from toolkit.memory.estimator import Estimator
from toolkit.units import GIB

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "engine-2xh200.jsonl"
HEADER, *ROWS = map(json.loads, RESULTS.read_text(encoding="utf-8").splitlines())
OURS = {(row["case"], row["gradient_checkpointing"]): row for row in ROWS if row.get("mode") == "toolkit"}


@pytest.fixture(scope="module")
def estimator():
    return Estimator()


@pytest.mark.parametrize(("case", "checkpointing"), sorted(OURS))
def test_peak_and_host_memory_are_those_of_the_run(estimator, case, checkpointing):
    stage, _, profile = case.removeprefix("zero").partition("-")
    job = {
        "model": {"name": "llama-3.2-1b", "init": "random"},
        "cluster": {"gpu": "h200-sxm-141gb", "gpus_per_node": 2},
        "train": {
            "sequence_length": HEADER["sequence_length"],
            "per_device_train_batch_size": HEADER["micro_batch"],
            "gradient_accumulation_steps": HEADER["accumulation"],
            "gradient_checkpointing": checkpointing,
        },
        "parallel": {"zero_stage": int(stage), "offload": profile or "none"},
    }
    report = estimator.estimate(Case.of(tk.Job.model_validate(job)))
    row = OURS[case, checkpointing]
    assert report.peak_allocated_bytes == pytest.approx(row["peak_allocated_gib"] * GIB, rel=0.002)
    host = sum(report.host.bytes_per_rank.values())
    assert host == pytest.approx(row["host_peak_rss_gib"] * GIB, rel=0.1)
