"""What is said of weights that cannot be loaded; a folder as each kind of unlucky download leaves it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_models import tiny_model

from toolkit.catalog.models import resolve_model
from toolkit.catalog.pretrained import weight_problems
from toolkit.catalog.weights import INDEX, SINGLE
from toolkit.config.job import Model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("llama").save_pretrained(tmp_path)
    return tmp_path


def said_of(name: object) -> tuple[str, ...]:
    return tuple(
        f"{problem.code}: {problem.message}" for problem in weight_problems(resolve_model(Model(name=str(name))))
    )


def test_whole_weights(folder: Path) -> None:
    assert said_of(folder) == ()


def test_weights_that_are_cut_or_missing(folder: Path) -> None:
    whole = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(whole[:-1])
    assert said_of(folder) == (f"MODEL_NO_WEIGHTS: the weights in {folder} are incomplete: {SINGLE}",)
    (folder / SINGLE).unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    assert said_of(folder) == (f"MODEL_NO_WEIGHTS: the weights in {folder} are incomplete: one.safetensors is missing",)


def test_no_weights_and_pickled_ones(folder: Path) -> None:
    (folder / SINGLE).rename(folder / "pytorch_model.bin")
    assert said_of(folder)[0].startswith(f"WEIGHTS_BIN: {folder} has pytorch_model.bin")
    (folder / "pytorch_model.bin").unlink()
    assert said_of(folder)[0].startswith(f"MODEL_NO_WEIGHTS: model={folder} gives dimensions only")
    (problem,) = weight_problems(resolve_model(Model(name="llama-3.1-8b")))
    assert problem.code == "MODEL_NO_WEIGHTS"
    assert "meta-llama/Llama-3.1-8B" in problem.fix
