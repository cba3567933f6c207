"""ms-swift's keys mean in a job what they mean there."""

from __future__ import annotations

import pytest
from readings import outcome, read, values

from toolkit.migration.draft import Draft
from toolkit.migration.ms_swift import MS_SWIFT


@pytest.mark.parametrize(
    ("keys", "target", "value"),
    [
        ({}, "train.learning_rate", 1e-4),
        ({"tuner_type": "full"}, "train.learning_rate", 1e-5),
        ({"train_type": "full", "learning_rate": 3e-5}, "train.learning_rate", 3e-5),
        ({"per_device_train_batch_size": 3}, "train.gradient_accumulation_steps", 6),
        ({"quant_bits": 4, "quant_method": "bnb"}, "train.method", "qlora"),
        ({"torch_dtype": "float16"}, "train.precision", "fp16"),
        ({"torch_dtype": "bfloat16", "fp16": True}, "train.precision", "fp16"),
        ({"packing": True, "truncation_strategy": "split"}, "data.packing", "separated"),
        ({}, "data.long_rows", "drop"),
        ({"truncation_strategy": "right"}, "data.long_rows", None),
        ({"dataset": "a.jsonl", "loss_scale": "last_round"}, "data.loss_on", "last_assistant"),
        ({"dataset": "a.jsonl", "<command>": "pt"}, "data.format", "text"),
        ({"dataset": ["HF::o/d:en#9"]}, "data.sources", [{"path": "o/d", "name": "en", "max_rows": 9, "format": "messages"}]),
        ({"dataset": "a.jsonl", "columns": '{"q": "query", "a": "response"}'}, "data.sources", [{"path": "a.jsonl", "format": "messages", "columns": {"instruction": "q", "output": "a"}}]),
        ({"target_regex": r".*\.q_proj"}, "train.lora.target_modules", r".*\.q_proj"),
        ({"attn_impl": "flash_attn"}, "train.attention", "flash_attention_2"),
        ({"deepspeed_autotp_size": 2}, "parallel.tensor", 2),
        ({"system": "Be kind."}, "data.system_prompt", "Be kind."),
        ({}, "train.weight_decay", 0.1),
        ({"dataset": "a.jsonl", "val_dataset": "b.jsonl", "save_steps": 40}, "train.eval_steps", 40),
    ],
)  # fmt: skip
def test_a_value(keys, target, value):
    assert values(MS_SWIFT, keys, target) == [value]


def test_the_accumulation_depends_on_the_cards():
    draft = Draft()
    draft.fix("cluster.gpus_per_node", 4, "--num-gpus")
    read(MS_SWIFT, {"per_device_train_batch_size": 2}, draft=draft)
    assert draft.get("train.gradient_accumulation_steps") == 2  # 16 = 2 × 2 × 4


@pytest.mark.parametrize(
    ("key", "keys"),
    [
        ("tuner_type", {"tuner_type": "longlora"}),
        ("quant_method", {"quant_method": "hqq", "quant_bits": 4}),
        ("template", {"template": "qwen2_5"}),
        ("loss_scale", {"dataset": "a.jsonl", "loss_scale": "hermes"}),
        ("truncation_strategy", {"truncation_strategy": "left"}),
        ("system", {"system": "system.txt"}),
        ("lora_bias", {"lora_bias": "all"}),
    ],
)
def test_what_no_job_says(key, keys):
    assert outcome(MS_SWIFT, key, keys) == "not carried"


def test_ids_of_modelscope_are_told():
    assert any("ModelScope" in note for note in read(MS_SWIFT, {"dataset": "a/b"})[0].notes)
    assert not any("ModelScope" in note for note in read(MS_SWIFT, {"dataset": "a/b", "use_hf": True})[0].notes)


def test_a_name_that_self_cognition_has_a_place_for_is_not_carried():
    keys = {"dataset": "swift/self-cognition#500", "model_name": "robot", "model_author": "swift"}
    assert outcome(MS_SWIFT, "model_name", keys) == outcome(MS_SWIFT, "model_author", keys) == "not carried"
    assert outcome(MS_SWIFT, "model_name", keys | {"dataset": "a.jsonl"}) != "not carried"
