"""The estimate of tensor ranks against runs of `benchmarks/tensor_parallel.py` on two H200s: every phase, to the printed digit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from card_runs import own_step  # noqa: F401  # a fixture

import toolkit as tk
from toolkit.catalog.models import read_catalogue_model
from toolkit.units import GIB

ROWS = Path(__file__).parents[2] / "benchmarks" / "results" / "tensor-2xh200.jsonl"
OWN = {
    row["case"]: row
    for row in map(json.loads, ROWS.read_text(encoding="utf-8").splitlines())
    if row["case"].startswith("toolkit:")
}


def report_of(row: dict[str, Any], folder: Path) -> Any:
    config = dict(read_catalogue_model(row["model"]).config) | {"num_hidden_layers": row["layers"]}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    job = {
        "model": {"name": str(folder), "init": "random"},
        "cluster": {"gpu": "h200-sxm-141gb", "gpus_per_node": 2},
        "train": {
            "sequence_length": 4096,
            "per_device_train_batch_size": 4,
            "gradient_checkpointing": "checkpointing=1" in row["case"],
            "kernels": "liger" if "kernels=liger" in row["case"] else "eager",
            "torch_compile": "kernels=compile" in row["case"],
            "weight_decay": 0.1,
        },
        "parallel": {"zero_stage": 1, "tensor": row["tp"]},
    }
    return tk.estimate(tk.resolve(tk.Job.model_validate(job)))


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.full] if "compile" in case else []) for case in OWN]
)
def test_each_phase_is_that_of_the_card(case: str, tmp_path: Path) -> None:
    row = OWN[case]
    phases = report_of(row, tmp_path).fullest.phases
    for name, gib in row["phases_gib"].items():
        assert phases[name].allocated_bytes / GIB == pytest.approx(gib["measured"], abs=0.02), name
