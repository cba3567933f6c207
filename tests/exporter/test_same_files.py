"""Equal weights are exported as equal files, whichever layout wrote the checkpoint."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from ranks import run_distributed
from tiny_models import tiny_model
from train_jobs import job_values, write_inputs

from toolkit.checkpoint.inspection import inspect, verify_quickly
from toolkit.config.job import Job
from toolkit.exporter.checkpoint import export
from toolkit.planning.resolve import resolve
from toolkit.reshape.compare import compare

pytestmark = [pytest.mark.gloo, pytest.mark.full]

RUNS: dict[str, dict[str, Any]] = {
    **{f"zero-{stage}": {"zero_stage": stage} for stage in (0, 1, 2, 3)},
    "ddp": {"strategy": "ddp", "zero_stage": None},
    "fsdp2": {"strategy": "fsdp2", "zero_stage": None},
    "tensor": {"tensor": 2, "zero_stage": 1},
    "pipeline": {"pipeline": 2, "zero_stage": 1},
}
ALONE: dict[str, dict[str, Any]] = {"zero-3-alone": {"zero_stage": 3}, "zero-0-alone": {"zero_stage": 0}}


def _train(rank: int, root: str, runs: dict[str, dict[str, Any]], num_ranks: int) -> None:
    from toolkit.trainer.loop import train
    from toolkit.trainer.progress import Silent

    for name, parallel in runs.items():
        # A rate so small that rounding leaves every weight as it was read.
        steps = {"max_steps": 1, "save_steps": 1, "warmup_steps": 0, "learning_rate": 1e-30, "precision": "bf16"}
        job = job_values(
            Path(root),
            name,
            model={"init": "pretrained"},
            cluster={"gpus_per_node": num_ranks},
            train=steps,
            parallel=parallel,
        )
        train(resolve(Job.model_validate(job)), reporter=Silent())


def test_files_are_those_of_the_weights(tmp_path: Path) -> None:
    write_inputs(tmp_path, architecture="llama-tied", num_documents=10)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    sizes = {key: config[key] for key in ("vocab_size", "max_position_embeddings")}
    model = tiny_model("llama-tied", bos_token_id=None, eos_token_id=0, pad_token_id=1, **sizes)
    model.bfloat16().save_pretrained(tmp_path / "model")
    run_distributed(_train, 2, str(tmp_path), RUNS, 2)
    run_distributed(_train, 1, str(tmp_path), ALONE, 1)
    files: dict[str, dict[str, str]] = {}
    for name in (*RUNS, *ALONE):
        checkpoint = tmp_path / name / "checkpoint-1"
        assert verify_quickly(checkpoint, deep=True)
        found = inspect(checkpoint)
        same = compare(tmp_path / "zero-0" / "checkpoint-1", checkpoint, optimizer=False)
        assert same.is_equal
        assert same.num_equal == {"weight": 20}
        assert (found["pipeline"], found["tensor"]) == (1 + (name == "pipeline"), 1 + (name == "tensor"))
        export(checkpoint, tmp_path / "out" / name)
        files[name] = {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (tmp_path / "out" / name).iterdir()
        }
        files[name].pop("README.md")  # how it was trained, and for how long
    assert all(found == files["zero-0"] for found in files.values()), files
