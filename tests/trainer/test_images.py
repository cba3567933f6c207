"""`toolkit train` of models that read images: a resumed run is the same, and transformers loads what it exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_images import image_job
from train_jobs import start_toolkit

TRAIN = {"max_steps": 6, "save_steps": 3, "learning_rate": 1e-3}


def trained(job: Path, *options: str) -> None:
    done = start_toolkit(job.parent, "train", job.name, *options)
    said, errors = done.communicate(timeout=600)
    assert done.returncode == 0, said + errors


def losses(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def written(root: Path, family: str, **train: Any) -> Path:
    root.mkdir()
    job = image_job(root, family, train={**TRAIN, "logging_steps": 1, **train})
    path = root / "job.yaml"
    path.write_text(yaml.safe_dump(job), encoding="utf-8")
    return path


@pytest.mark.gloo
@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "llava", "smolvlm"])
def test_an_export_is_what_transformers_loads(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    from toolkit.data.processor import load_processor

    job = written(tmp_path / "run", family)
    trained(job)
    export = tmp_path / "run" / "out" / "export"
    model, found = AutoModelForImageTextToText.from_pretrained(export, output_loading_info=True)
    assert not any(found.values()), found
    assert model.config.architectures == [type(model).__name__]
    again, first = (load_processor(path, model_type=family) for path in (export, tmp_path / "run" / "model"))
    assert again.identity == first.identity
    assert again.chat_template == first.chat_template
    trained(
        job,
        "--set",
        "train.max_steps=7",
        "--set",
        f"model.name={export}",
        "--set",
        "model.init=pretrained",
        "--set",
        f"train.output_dir={tmp_path / 'next'}",
    )
    assert losses(tmp_path / "next")[0] < losses(tmp_path / "run" / "out")[0]


@pytest.mark.gloo
@pytest.mark.full
@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_resumed_run_is_the_same(method: str, tmp_path: Path) -> None:
    whole, parted = (written(tmp_path / name, "qwen2_5_vl", method=method) for name in ("whole", "parted"))
    trained(whole)
    trained(parted, "--stop-after", "3")
    trained(parted, "--resume", "latest")
    assert losses(whole.parent / "out") == losses(parted.parent / "out")
    if method == "lora":
        adapter = json.loads((whole.parent / "out" / "export" / "adapter_config.json").read_text("utf-8"))
        excluded = adapter["exclude_modules"]
        assert excluded
        assert all(name.startswith("model.visual.") for name in excluded)
