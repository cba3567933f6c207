"""Runs on mixed sources with weights, a function of the user's and length grouping, on two real ranks: resumed as if never stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_distributed
from train_jobs import curve, job_values, records, write_inputs

from toolkit.config.job import Job
from toolkit.config.user_code import find_beside
from toolkit.distributed.world import destroy_world, init_world
from toolkit.engine.run import Run
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


def _streamed(rank: int, root_name: str, resume: bool) -> dict[str, Any]:
    """The whole run and one that dies after step 5, a step past its checkpoint; or that one's second session."""
    root = Path(root_name)
    data = {"train": [str(root / "data.jsonl"), str(root / "more.jsonl")], "streaming": True, "shuffle_buffer": 6}
    data |= {"eval": str(root / "more.jsonl"), "packing": "separated", "long_rows": "split"}
    if resume:
        return {"second": _run(root, "parts", data, resume="latest")}
    plan = resolve(Job.model_validate(job_values(root, "parts", data=data)))

    def die(run: Run) -> None:
        @run.on_step_end
        def at_five(run: Run, loss: torch.Tensor) -> None:
            if run.step_count == 5:
                raise KeyboardInterrupt

    results = {"whole": _run(root, "whole", data)}
    try:
        train(plan, reporter=Silent(), attach=die)
    except KeyboardInterrupt:
        destroy_world(init_world(plan.grid, backend="gloo"))
    results["other"] = _run(root, "parts", {**data, "shuffle_buffer": 5}, resume="latest")
    return results


def test_a_streamed_run_that_dies_goes_on_at_the_sample(tmp_path: Path) -> None:
    write_inputs(tmp_path, num_documents=7)
    more = [{"text": f"{number}" + " and so on" * (number % 6)} for number in range(5)]
    (tmp_path / "more.jsonl").write_text("".join(json.dumps(record) + "\n" for record in more))
    for results in run_distributed(_streamed, 2, str(tmp_path), False):
        assert results == {"whole": 8, "other": ("CHECKPOINT_DATA",)}
    assert not (tmp_path / "parts" / "checkpoint-8").exists()
    for results in run_distributed(_streamed, 2, str(tmp_path), True):
        assert results == {"second": 8}
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")
    assert len(curve(tmp_path / "whole")) == 8
    assert {record["epoch"] for record in records(tmp_path / "whole") if "epoch" in record} != {0}
    saved = [
        torch.load(tmp_path / run / "checkpoint-8" / "random" / "rank-00001.pt", weights_only=False)["stream"]
        for run in ("whole", "parts")
    ]
    assert [state["num_parts"] for state in saved] == [2, 2]
    whole, parts = (state["parts"] for state in saved)
    assert whole.keys() == parts.keys() == {1}
    for name, wanted in whole[1].items():
        found = parts[1][name]
        assert torch.equal(found, wanted) if isinstance(wanted, torch.Tensor) else found == wanted, name


def test_a_resumed_run_reads_what_the_whole_one_reads(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    pairs = [{"q": f"Ask {number}.", "a": " Say" * (1 + number % 7)} for number in range(20)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (tmp_path / "records_of_the_data_run_test.py").write_text(CODE)
    for results in run_distributed(_both, 2, str(tmp_path)):
        assert results == {"whole": 8, "first": 3, "other": ("CHECKPOINT_DATA",), "second": 8}
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")
    assert len(curve(tmp_path / "whole")) == 8
