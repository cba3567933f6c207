"""axolotl's keys mean in a job what they mean there."""

from __future__ import annotations

import pytest
from readings import outcome, read, values

from toolkit.migration.axolotl import AXOLOTL


def source(**keys):
    draft, entries = read(AXOLOTL, {"datasets": [{"path": "a.jsonl", **keys}], "train_on_inputs": False})
    return draft.document().get("data", {}), entries


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"type": "alpaca"}, {"train": "a.jsonl", "format": "prompt_completion", "loss_on": "completion"}),
        ({"type": "completion"}, {"train": "a.jsonl", "format": "text"}),
        ({"type": "completion", "field": "body"}, {"sources": [{"path": "a.jsonl", "format": "text", "columns": {"text": "body"}}]}),
        ({"type": "chat_template"}, {"train": "a.jsonl", "format": "messages", "loss_on": "assistant"}),
        ({"type": "chat_template", "roles_to_train": ["gpt", "human"]}, {"train": "a.jsonl", "format": "messages", "loss_on": ["assistant", "user"]}),
        ({"type": "sharegpt"}, {"train": "a.jsonl", "format": "messages", "loss_on": "assistant"}),
        (
            {"type": "chat_template", "field_messages": "talk", "message_field_role": "from", "message_field_content": "value"},
            {"sources": [{"path": "a.jsonl", "format": "messages", "columns": {"conversations": "talk"}}], "loss_on": "assistant"},
        ),
        ({"ds_type": "json", "type": None}, {"train": "a.jsonl", "format": "tokens"}),
        ({"path": "json", "data_files": ["b.json"], "type": "alpaca"}, {"train": "b.json", "format": "prompt_completion", "loss_on": "completion"}),
    ],
)  # fmt: skip
def test_a_data_set(keys, expected):
    found, _ = source(**keys)
    assert {key: value for key, value in found.items() if key not in ("packing", "long_rows")} == expected


@pytest.mark.parametrize(
    "keys",
    [
        {"type": {"field_instruction": "q", "field_output": "a", "format": "{instruction}"}},
        {"type": "input_output"},
        {"type": "chat_template", "message_property_mappings": {"role": "speaker", "content": "said"}},
    ],
)
def test_a_strategy_that_no_job_has(keys):
    found, entries = source(**keys)
    assert "train" not in found
    assert "sources" not in found
    assert {entry.outcome for key, entry in entries.items() if key.startswith("datasets")} == {"not carried"}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"micro_batch_size": 2, "gradient_accumulation_steps": 4}, [2, 4]),
        ({"micro_batch_size": 2, "batch_size": 8}, [2, 4]),
        ({"micro_batch_size": 2}, [2, 1]),
    ],
)
def test_the_batch_of_a_card(keys, expected):
    assert values(AXOLOTL, keys, "train.per_device_train_batch_size", "train.gradient_accumulation_steps") == expected


@pytest.mark.parametrize(
    ("keys", "target", "value"),
    [
        ({}, "train.warmup_ratio", 0.03),
        ({"warmup_steps": 5}, "train.warmup_ratio", None),
        ({"lr_scheduler": "cosine", "cosine_min_lr_ratio": 0.1}, "train.lr_scheduler_type", "cosine_with_min_lr"),
        ({"sample_packing": True}, "data.packing", "separated"),
        ({}, "data.long_rows", "drop"),
        ({"excess_length_strategy": "truncate"}, "data.long_rows", None),
        ({"adapter": "lora", "lora_target_linear": True}, "train.lora.target_modules", "all-linear"),
        ({"adapter": "qlora", "load_in_4bit": True}, "train.method", "qlora"),
        ({"adapter": "lora", "load_in_8bit": True}, "train.method", "lora"),
        ({"adapter": None}, "train.method", "full"),
        ({"adapter": "lora", "peft_init_lora_weights": "pissa_niter_16"}, "train.lora.init_lora_weights", "pissa"),
        ({"bf16": "auto"}, "train.precision", None),
        ({"bf16": False, "fp16": True}, "train.precision", "fp16"),
        ({"bf16": False, "fp16": False}, "train.precision", "fp32"),
        ({"gradient_checkpointing": "offload"}, "parallel.offload", "activations-cpu"),
        ({"fsdp_config": {"offload_params": True, "reshard_after_forward": False}}, "parallel.fsdp2.cpu_offload", True),
        ({"sdp_attention": True}, "train.attention", "sdpa"),
        ({"plugins": ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"], "cut_cross_entropy": True}, "train.loss", "chunked"),
        ({"wandb_project": "p", "use_tensorboard": True}, "train.report_to", ["wandb", "tensorboard"]),
        ({"optimizer": "muon"}, "train.optimizer", "muon"),
        ({}, "train.saves_per_epoch", 1),
        ({"special_tokens": {"additional_special_tokens": ["<a>"]}}, "model.added_special_tokens", ["<a>"]),
        ({"tensor_parallel_size": 2}, "parallel.tensor", 2),
        ({"val_set_size": 0.05}, "data.validation_fraction", 0.05),
    ],
)  # fmt: skip
def test_a_value(keys, target, value):
    assert values(AXOLOTL, keys, target) == [value]


@pytest.mark.parametrize(
    ("key", "keys"),
    [
        ("load_in_8bit", {"adapter": "lora", "load_in_8bit": True}),
        ("val_set_size", {"val_set_size": 200}),
        ("chat_template", {"chat_template": "llama3"}),
        ("special_tokens.eos_token", {"special_tokens": {"eos_token": "<|im_end|>"}}),
        ("flex_attention", {"flex_attention": True}),
        ("optimizer", {"optimizer": "came_pytorch"}),
        ("lr_scheduler", {"lr_scheduler": "rex"}),
        ("lora_target_parameters", {"lora_target_parameters": ["a"]}),
        ("save_strategy", {"save_strategy": "no"}),
    ],
)
def test_what_no_job_says(key, keys):
    assert outcome(AXOLOTL, key, keys) == "not carried"
