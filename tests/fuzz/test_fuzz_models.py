"""Any model folder is a model or one clear refusal: its config, its tokenizer, its weights' headers, whatever they hold."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from fuzzing import FULL_COUNT, Case, assert_report_adds_up, attempt, command, is_chosen, run_cases, tree
from mutations import encoded, mutate, mutate_bytes, mutate_text
from safetensors.torch import save_file
from tiny_models import tiny_config
from train_jobs import write_inputs

from toolkit.config.job import Job
from toolkit.memory.scenario import Scenario as MemoryCase
from toolkit.memory.search.estimator import Estimator

ARCHITECTURES = ("llama", "gpt2", "gemma2", "mixtral", "deepseek_v2", "qwen3_moe", "falcon", "opt", "gpt_neox", "phi3")
NAMES = (
    "architectures",
    "model_type",
    "torch_dtype",
    "dtype",
    "auto_map",
    "quantization_config",
    "rope_scaling",
    "num_labels",
)
SHARDS = {"model.safetensors": {"a": torch.zeros(2, 3), "b": torch.ones(4)}}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a job on `model/`, to work in; every case writes that folder anew."""
    root = tmp_path_factory.mktemp("fuzz-models")
    write_inputs(root, num_documents=4)
    (root / "model").rename(root / "tokenizer")
    job = {
        "model": {"name": "model"},
        "cluster": {"gpu": "h100-sxm-80gb", "gpus_per_node": 2},
        "train": {"sequence_length": 16, "per_device_train_batch_size": 1, "max_steps": 4},
        "data": {"train": "data.jsonl"},
    }
    (root / "job.yaml").write_text(yaml.safe_dump(job), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        yield root


def _write_model(rng: random.Random, folder: Path) -> str:
    """Writes a folder of which one file is not as it should be; gives what it holds."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(folder.parent / "tokenizer", folder)
    config: dict[str, Any] = json.loads(json.dumps(tiny_config(rng.choice(ARCHITECTURES)).to_dict(), default=str))
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "generation_config.json").write_text('{"eos_token_id": 0, "max_new_tokens": 7}', encoding="utf-8")
    save_file(SHARDS["model.safetensors"], folder / "model.safetensors")
    index = {
        "metadata": {"total_size": 40},
        "weight_map": dict.fromkeys(SHARDS["model.safetensors"], "model.safetensors"),
    }
    if rng.random() < 0.5:
        (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    names = sorted(path.name for path in folder.iterdir())
    path = folder / rng.choice([*names, *["config.json"] * len(names)])
    if path.suffix != ".json":
        path.write_bytes(mutate_bytes(rng, path.read_bytes()))
        return path.name
    value = json.loads(path.read_text("utf-8"))
    while True:
        value = mutate(rng, value, names=NAMES)
        if rng.random() < 0.6:
            break
    text = json.dumps(value)
    while rng.random() < 0.15:
        text = mutate_text(rng, text)
    path.write_bytes(encoded(rng, text, share=0.05))
    if rng.random() < 0.03:
        path.unlink()
        rng.choice((lambda: path.mkdir(), lambda: os.mkfifo(path), lambda: path.symlink_to(path), lambda: None))()
    return f"{path.name}: {text}"


def _model_case(case: Case, root: Path, estimator: Estimator) -> None:
    case.note(_write_model(case.rng, root / "model")[:1500])
    before = tree(root)
    code, _, _ = command(case, "validate", "job.yaml", "--json")
    assert code in (0, 2)
    case.outcome = "sound" if code == 0 else "refused"
    if code == 0 and case.rng.random() < 0.15:
        command(case, "train", "job.yaml", "--dry-run")
    if code == 0 and case.rng.random() < 0.1:
        job = Job.from_yaml("job.yaml")
        report, refused = attempt(lambda: estimator.estimate(MemoryCase.of(job)))
        case.outcome = "estimated" if refused is None else "not estimated"
        if report is not None:
            assert_report_adds_up(report)
    assert tree(root) == before


def _run_models(place: Path, count: int) -> dict[str, int]:
    estimator = Estimator()
    return run_cases("models", count, lambda case: _model_case(case, place, estimator))


def test_model_folders(place: Path) -> None:
    outcomes = _run_models(place, 25)
    if not is_chosen():
        assert outcomes["sound"] > 2 < outcomes["refused"]


@pytest.mark.full
def test_model_folders_in_full(place: Path) -> None:
    _run_models(place, FULL_COUNT)
