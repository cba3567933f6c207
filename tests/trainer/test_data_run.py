"""Runs on mixed sources with weights, a function of the user's and length grouping, on two real ranks: resumed as if never stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_distributed
from train_jobs import curve, job_values, write_inputs

from toolkit.config.job import Job
from toolkit.config.user_code import find_beside
from toolkit.errors import ToolkitError
from toolkit.planning.resolve import resolve
from toolkit.trainer.loop import train
from toolkit.trainer.progress import Silent

pytestmark = [pytest.mark.gloo, pytest.mark.full]

CODE = """
def shorter(record):
    return None if len(str(record)) % 5 == 0 else record
"""


def _data(root: Path) -> dict[str, Any]:
    return {
        "train": None,
        "sources": [
            {"path": str(root / "data.jsonl"), "weight": 0.5},
            {"path": str(root / "pairs.jsonl"), "columns": {"prompt": "q", "completion": "a"}, "weight": 2.0},
        ],
        "preprocess": "records_of_the_data_run_test:shorter",
        "packing": "none",
        "long_rows": "split",
        "group_by_length": True,
        "validation_fraction": 0.2,
    }


def _run(root: Path, name: str, data: dict[str, Any], resume: str | None = None, stop_after: int | None = None) -> Any:
    plan = resolve(Job.model_validate(job_values(root, name, data=data)))
    try:
        return train(plan, resume=resume, stop_after=stop_after, reporter=Silent()).step
    except ToolkitError as error:
        return error.codes


def _both(rank: int, root_name: str) -> dict[str, Any]:
    root = Path(root_name)
    find_beside(root / "job.yaml")
    data = _data(root)
    results = {"whole": _run(root, "whole", data), "first": _run(root, "parts", data, stop_after=3)}
    torch.rand(17 + rank)
    heavier = {**data, "sources": [{**data["sources"][0], "weight": 1.5}, data["sources"][1]]}
    results["other"] = _run(root, "parts", heavier, resume="latest")
    results["second"] = _run(root, "parts", data, resume="latest")
    return results


def test_a_resumed_run_reads_what_the_whole_one_reads(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    pairs = [{"q": f"Ask {number}.", "a": " Say" * (1 + number % 7)} for number in range(20)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (tmp_path / "records_of_the_data_run_test.py").write_text(CODE)
    for results in run_distributed(_both, 2, str(tmp_path)):
        assert results == {"whole": 8, "first": 3, "other": ("CHECKPOINT_DATA",), "second": 8}
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")
    assert len(curve(tmp_path / "whole")) == 8
