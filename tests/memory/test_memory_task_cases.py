"""The cases of tasks for a card: each is planned as written, and runs on a CPU with a shrunk model as `job_speed.py` runs it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from card_runs import CARDS  # which puts the benchmarks on the import path
from job_speed import plan_of, read_cases, run_toolkit

CASES = {case["id"]: case for case in read_cases(CARDS / "task_cases.yaml")}
DEFAULT = ("deberta-number-zero2",)
TINY = {
    **dict.fromkeys(("hidden_size", "d_model", "pooler_hidden_size"), 32),
    **dict.fromkeys(("intermediate_size", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"), 4),
    "num_key_value_heads": 2, "head_dim": 8, "d_kv": 8, "vocab_size": 96, "max_position_embeddings": 66, "position_buckets": 16,
}  # fmt: skip


def shrunk(case: dict[str, Any]) -> dict[str, Any]:
    config = {key: TINY.get(key, value) for key, value in case["config"].items()}
    tokens = {key: min(value, 4) for key, value in config.items() if key.endswith("token_id")}
    train = {**case["train"], "sequence_length": 16, "per_device_train_batch_size": 2, "precision": "fp32"}
    return {**case, "config": config | tokens, "train": train}


@pytest.mark.parametrize("name", CASES)
def test_a_case_is_planned_on_the_card(tmp_path: Path, name: str) -> None:
    plan = plan_of(CASES[name], tmp_path, gpu="h200-sxm-141gb")
    assert plan.settings.task != "causal-lm"
    assert plan.settings.sequence_length == CASES[name]["train"]["sequence_length"]


def runs(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("job_speed.STEPS", 2)
    monkeypatch.setattr("job_speed.WARM_UP", 0)
    row: dict[str, Any] = {}
    run_toolkit(plan_of(shrunk(CASES[name]), tmp_path, gpu="cpu"), row, profile=False, traces=None)
    assert len(row["losses"]) == 2
    assert all(map(math.isfinite, row["losses"]))


@pytest.mark.gloo
@pytest.mark.parametrize("name", DEFAULT)
def test_a_shrunk_case_runs(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runs(tmp_path, name, monkeypatch)


@pytest.mark.full
@pytest.mark.gloo
@pytest.mark.parametrize("name", [name for name in CASES if name not in DEFAULT])
def test_every_shrunk_case_runs(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runs(tmp_path, name, monkeypatch)
