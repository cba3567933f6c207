"""The row of a model says what works and why the rest does not, each part tried."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

import toolkit as tk
from toolkit.errors import SpecError
from toolkit.support.support import support_of


def folder_of(root: Path, model_type: str, **values: Any) -> str:
    CONFIG_MAPPING[model_type](**values).save_pretrained(root)
    return str(root)


def test_a_model_with_a_written_table() -> None:
    found = support_of("quickstart-llama")
    assert (found.model_type, found.architecture) == ("llama", "LlamaForCausalLM")
    assert [one.part for one in found.verdicts if one.supported] == ["estimate", "tensor", "pipeline", "lora", "export"]
    assert found.of("tensor").detail == "its table is written, and held by tests"
    assert found.of("tensor").sizes == (2, 4)
    assert found.of("pipeline").sizes == (2, 3, 4)
    assert found.of("lora").detail == "all-linear adapts down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    assert tk.support_of("quickstart-llama") == found
    assert json.loads(json.dumps(found.to_dict()))["verdicts"][1]["sizes"] == [2, 4]


def test_a_model_whose_table_is_derived(tmp_path: Path) -> None:
    found = support_of(
        folder_of(
            tmp_path,
            "glm4",
            num_hidden_layers=3,
            num_attention_heads=12,
            num_key_value_heads=2,
            head_dim=128,
            intermediate_size=12288,
        )
    )
    assert found.of("tensor").sizes == (2, 4, 6, 12)
    assert "derived and proven, largest difference" in found.of("tensor").detail
    assert "99% of the layers' parameters are shared" in found.of("tensor").detail
    assert found.of("pipeline").sizes == (2, 3)


def test_each_no_has_its_reason(tmp_path: Path) -> None:
    found = support_of(folder_of(tmp_path, "mamba", num_hidden_layers=2))
    no = {one.part: one.detail for one in found.verdicts if not one.supported}
    assert no.keys() == {"tensor", "lora"}
    assert "only 0% of its parameters outside the vocabulary can be shared by ranks" in no["tensor"]
    assert "incompatible with Mamba-based models" in no["lora"]
    assert found.of("export").supported


def test_a_task_that_is_not_trained_is_the_reason_of_the_estimate_alone(tmp_path: Path) -> None:
    text = {"num_hidden_layers": 6, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}
    found = support_of(folder_of(tmp_path, "gemma3", text_config=text, vision_config={"num_hidden_layers": 2}))
    assert found.of("tensor").supported
    assert found.of("pipeline").supported
    estimated = found.of("estimate")
    assert estimated.supported or "above sequence_length=64" in estimated.detail


def test_a_model_that_is_not_there() -> None:
    with pytest.raises(SpecError) as caught:
        support_of("./no-such-model")
    assert caught.value.codes == ("MODEL_NOT_FOUND",)
