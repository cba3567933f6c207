"""What is emitted for a pipeline: files of our own engine, whose numbers are explained where they are not the plan's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from toolkit.artifacts.files import emit
from toolkit.config.job import Job
from toolkit.planning.resolve import resolve

SCRIPTS = ["torchrun-script", "deepspeed-script", "accelerate-script"]
OTHERS = ("deepspeed-trainer.json", "training_arguments.json", "deepspeed-accelerate.json", "accelerate.yaml")


def emitted(folder: Path, *, nodes: int = 1, gpus: int = 2, hosts: list[str] | None = None, **parallel: Any) -> None:
    plan = resolve(
        Job.model_validate(
            {
                "model": {"name": "llama-3.1-8b", "init": "random", "tokenizer": "org/name"},
                "data": {"train": "org/data", "format": "text"},
                "cluster": {"gpu": "h100-sxm-80gb", "gpus_per_node": gpus, "nodes": nodes},
                "train": {"gradient_accumulation_steps": 8, "gradient_accumulation_dtype": "fp32"},
                "parallel": {"pipeline": 2, "zero_stage": 1, **parallel},
            }
        )
    )
    emit(plan, folder, hosts=hosts)


@pytest.mark.parametrize(
    ("sizes", "ways"),
    [
        ({"gpus": 2}, ["toolkit", "torchrun", "deepspeed", *SCRIPTS]),
        ({"gpus": 8, "nodes": 2, "tensor": 8}, ["torchrun", "torchrun-script", "accelerate-script"]),
        ({"gpus": 8, "nodes": 2, "tensor": 4, "hosts": ["a", "b"]}, ["torchrun", "deepspeed", *SCRIPTS]),
    ],
)
def test_the_files_of_our_own_engine_alone(tmp_path: Path, sizes: dict[str, Any], ways: list[str]) -> None:
    emitted(tmp_path, **sizes)
    files = {file.name for file in tmp_path.iterdir()}
    assert files >= {"plan.json", "deepspeed.json", "commands.sh", "README.txt", "provenance.json"}
    assert not files & set(OTHERS)
    commands = (tmp_path / "commands.sh").read_text()
    assert [line.strip(" )") for line in commands.splitlines() if line.startswith("  ") and line.endswith(")")] == [
        *ways,
        "*",
    ]
    left_out = json.loads((tmp_path / "provenance.json").read_text())["left_out"]
    assert set(left_out) == set(OTHERS)
    assert all("INTEGRATION_PIPELINE" in [problem["code"] for problem in found] for found in left_out.values())


def test_numbers_that_are_not_the_plans_are_explained(tmp_path: Path) -> None:
    emitted(tmp_path, gpus=4)
    config = json.loads((tmp_path / "deepspeed.json").read_text())
    readme = (tmp_path / "README.txt").read_text()
    (line,) = [line for line in readme.splitlines() if line.startswith("  deepspeed.json")]
    assert "gradient_accumulation_steps is 1 in this file, since our loop runs the 8 micro-batches of a step" in line
    assert "pipeline: 2 stages of 17, 15 layers, 1f1b: 8 micro-batches, bubble 11.1%" in readme
    keys = json.loads((tmp_path / "provenance.json").read_text())["keys"]["deepspeed.json"]
    expected = {"train_batch_size": 4, "gradient_accumulation_steps": 1, "data_types.grad_accum_dtype": "bf16"}
    for path, value in expected.items():
        assert keys[path]["value"] == value
        assert keys[path]["choices"]
        assert keys[path]["reason"]
    assert (config["train_batch_size"], config["gradient_accumulation_steps"]) == (4, 1)


def test_without_stages_nothing_is_said_of_them(tmp_path: Path) -> None:
    emitted(tmp_path, gpus=2, pipeline=1)
    assert "our loop runs" not in (tmp_path / "README.txt").read_text()
    keys = json.loads((tmp_path / "provenance.json").read_text())["keys"]["deepspeed.json"]
    assert keys["gradient_accumulation_steps"]["reason"] == ""
