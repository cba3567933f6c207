"""The row of a model says what works and why the rest does not, each part tried."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

import toolkit as tk
from toolkit.errors import PlanError, SpecError
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


@pytest.mark.parametrize(
    ("model_type", "architecture", "task"),
    [
        ("bert", "BertForMaskedLM", "masked-lm"),
        ("bert", "BertForTokenClassification", "token-classification"),
        ("llama", "LlamaForSequenceClassification", "sequence-classification"),
        ("t5", "T5ForConditionalGeneration", "seq2seq-lm"),
    ],
)
def test_a_row_is_that_of_the_task_that_a_job_would_have(
    tmp_path: Path, model_type: str, architecture: str, task: str
) -> None:
    found = support_of(folder_of(tmp_path, model_type, architectures=[architecture]))
    assert found.architecture == architecture
    assert [one.part for one in found.verdicts if one.supported] == ["estimate", "lora", "export"]
    job = tk.Job(model=tk.Model(name=str(tmp_path)), cluster=tk.Cluster(gpu="h100-sxm-80gb", gpus_per_node=8))
    for part in ("tensor", "pipeline"):
        with pytest.raises(PlanError) as caught:
            tk.resolve(job.with_({f"parallel.{part}": 2, "train.per_device_train_batch_size": 1}))
        told = {problem.key: problem.message for problem in caught.value.problems}
        assert found.of(part).detail == told[f"parallel.{part}"]
        assert f"{part}=2 with task={task}" in told[f"parallel.{part}"]


def test_the_row_of_a_model_that_reads_images(tmp_path: Path) -> None:
    """Of the published form of Qwen2-VL, whose text has no section of its own."""
    text = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision = {"depth": 2, "embed_dim": 64, "hidden_size": 256, "num_heads": 2, "patch_size": 14}
    config = {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        **text,
        "num_key_value_heads": 2,
        "vocab_size": 152064,
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
        "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
        "vision_config": {**vision, "in_chans": 3, "mlp_ratio": 4, "spatial_patch_size": 14},
        "image_token_id": 151655,
        "video_token_id": 151656,
        "vision_start_token_id": 151652,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = support_of(tmp_path)
    assert found.architecture == "Qwen2VLForConditionalGeneration"
    assert [one.part for one in found.verdicts if one.supported] == ["estimate", "lora", "export"]
    for part in ("tensor", "pipeline"):
        assert "task=image-text-to-text: the modules for images are not split over ranks" in found.of(part).detail


def test_a_model_that_is_not_there() -> None:
    with pytest.raises(SpecError) as caught:
        support_of("./no-such-model")
    assert caught.value.codes == ("MODEL_NOT_FOUND",)
