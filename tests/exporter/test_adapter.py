"""Settings of an adapter that a stranger has written: patterns, targets, counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig
from tiny_models import tiny_config

from toolkit import bounded
from toolkit.errors import CheckpointError
from toolkit.exporter.adapter import read_adapter_config
from toolkit.exporter.model_folder import adapted_model, empty_model

ENDLESS = r"(?:(?:.+)+)+!"


def described(folder: Path, architecture: str = "llama", **values: Any) -> Path:
    tiny_config(architecture).save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


def adapter(folder: Path, **values: Any) -> Path:
    folder.mkdir(exist_ok=True)
    LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM").save_pretrained(str(folder))
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


@pytest.mark.parametrize(
    "key", ["rank_pattern", "alpha_pattern", "modules_to_save", "exclude_modules", "layers_pattern"]
)
def test_patterns_where_our_runs_write_names(tmp_path: Path, key: str) -> None:
    listed = key in ("modules_to_save", "layers_pattern")
    adapter(tmp_path, **{key: [ENDLESS] if listed else ENDLESS if key == "exclude_modules" else {ENDLESS: 4}})
    with pytest.raises(CheckpointError) as caught:
        read_adapter_config(tmp_path)
    assert caught.value.codes == ("EXPORT_ADAPTER_CONFIG",)
    said = str(caught.value)
    assert f"{tmp_path / 'adapter_config.json'}: {key}={ENDLESS!r} is not the name of a module" in said
    assert "Put this job's adapter_config.json into" in said


def test_more_patterns_than_are_remembered(tmp_path: Path) -> None:
    adapter(tmp_path, rank_pattern={f"q{number}_proj": 4 for number in range(300)}, target_modules=["a"] * 100_001)
    with pytest.raises(CheckpointError) as caught:
        read_adapter_config(tmp_path)
    assert [problem.message.partition(": ")[2] for problem in caught.value.problems] == [
        "rank_pattern has 300 entries, and may have 256",
        "target_modules has 100,001 entries, and may have 100,000",
    ]


@pytest.mark.parametrize(
    "values",
    [
        {"rank_pattern": {r".*\.gate_up_proj": 8}, "alpha_pattern": {"^model.layers.0.mlp": 8, r"v_proj$": 4}},
        {"target_modules": ["q_proj", "model.layers.0.self_attn.k_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": r".*\.layers\.(0|1)\..*(q|v)_proj"},
        {"target_modules": "all-linear"},
    ],
)
def test_what_our_runs_write(tmp_path: Path, values: dict[str, Any]) -> None:
    lora = read_adapter_config(adapter(tmp_path, **values))
    model = adapted_model(empty_model(described(tmp_path), trust_remote_code=False, num_tensors=20), lora)
    assert any("q_proj.lora_A" in name for name, _ in model.named_parameters())


@pytest.mark.parametrize(("architecture", "pattern"), [("llama", ENDLESS), ("mixtral", rf"(?=.*experts\.w1){ENDLESS}")])
def test_a_regular_expression_of_targets_that_takes_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, pattern: str
) -> None:
    """Also one that only matches long with a name that peft makes up, of a module that transformers fused into another."""
    monkeypatch.setattr(bounded, "SECONDS", 1)
    lora = read_adapter_config(adapter(tmp_path, target_modules=pattern))
    model = empty_model(described(tmp_path, architecture), trust_remote_code=False, num_tensors=20)
    with pytest.raises(CheckpointError) as caught:
        adapted_model(model, lora)
    assert caught.value.codes == ("EXPORT_ADAPTER_CONFIG",)
    assert f"target_modules={pattern!r} takes too long to match with the names of the modules" in str(caught.value)
