"""LLaMA-Factory's keys, and its registry of data sets, mean in a job what they mean there."""

from __future__ import annotations

import json

import pytest
from readings import outcome, read, values

from toolkit.migration.llama_factory import LLAMA_FACTORY


@pytest.fixture
def registry(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(**entries):
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(entries))

    return write


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"file_name": "a.json"}, {"train": "data/a.json", "format": "messages"}),
        ({"hf_hub_url": "o/d", "subset": "en", "split": "train[:9]", "revision": "x"}, {"train": "o/d", "name": "en", "split": "train[:9]", "revision": "x", "format": "messages"}),
        (
            {"file_name": "a.json", "columns": {"prompt": "q", "query": "ctx", "response": "a"}},
            {"sources": [{"path": "data/a.json", "format": "messages", "columns": {"instruction": "q", "input": "ctx", "output": "a"}}]},
        ),
        ({"file_name": "a.json", "formatting": "sharegpt"}, {"train": "data/a.json", "format": "messages"}),
        ({"file_name": "a.json", "formatting": "openai"}, {"train": "data/a.json", "format": "messages"}),
        ({"file_name": "a.json", "num_samples": 9}, {"sources": [{"path": "data/a.json", "max_rows": 9, "format": "messages"}]}),
    ],
)  # fmt: skip
def test_an_entry_of_the_registry(entry, expected, registry):
    registry(one=entry)
    draft, _ = read(LLAMA_FACTORY, {"dataset": "one"})
    assert draft.document()["data"] == {**expected, "packing": "none", "loss_on": "assistant"}


@pytest.mark.parametrize(
    "entry",
    [
        {"file_name": "a.json", "ranking": True},
        {"ms_hub_url": "o/d"},
        {"file_name": "a.json", "columns": {"images": "images"}},
        {"file_name": "a.json", "formatting": "sharegpt", "tags": {"role_tag": "speaker"}},
        {"file_name": "a.json", "folder": "x"},
    ],
)
def test_an_entry_that_no_job_reads(entry, registry):
    registry(one=entry)
    draft, entries = read(LLAMA_FACTORY, {"dataset": "one"})
    assert draft.get("data.train") is None
    assert (entries["dataset"].outcome, entries["dataset"].fix != "") == ("not carried", True)


def test_a_registry_that_is_not_there(registry):
    _, entries = read(LLAMA_FACTORY, {"dataset": "one"})
    assert "dataset_info.json does not exist" in entries["dataset"].reason
    registry(two={"file_name": "a.json"})
    _, entries = read(LLAMA_FACTORY, {"dataset": "one"})
    assert "has no entry one" in entries["dataset"].reason


@pytest.mark.parametrize(
    ("keys", "target", "value"),
    [
        ({}, "train.method", "lora"),
        ({"finetuning_type": "full"}, "train.method", "full"),
        ({"quantization_bit": 4}, "train.method", "qlora"),
        ({"lora_rank": 32}, "train.lora.lora_alpha", 64),
        ({"lora_rank": 32, "lora_alpha": 16}, "train.lora.lora_alpha", 16),
        ({"lora_target": "q_proj,v_proj"}, "train.lora.target_modules", ["q_proj", "v_proj"]),
        ({"lora_target": "all"}, "train.lora.target_modules", "all-linear"),
        ({"pissa_init": True}, "train.lora.init_lora_weights", "pissa"),
        ({}, "train.gradient_checkpointing", True),
        ({"disable_gradient_checkpointing": True}, "train.gradient_checkpointing", False),
        ({"neat_packing": True}, "data.packing", "separated"),
        ({"packing": True}, "data.packing", "wrapped"),
        ({"stage": "pt"}, "data.packing", "wrapped"),
        ({"flash_attn": "fa2"}, "train.attention", "flash_attention_2"),
        ({"template": "chatml"}, "data.chat_template", "chatml"),
        ({"val_size": 0.2}, "data.validation_fraction", 0.2),
        ({"enable_liger_kernel": True}, "train.loss", "liger"),
        ({"use_muon": True}, "train.optimizer", "muon"),
        ({"learning_rate": 1e-4}, "train.learning_rate", 1e-4),
        ({}, "train.sequence_length", 2048),
    ],
)
def test_a_value(keys, target, value):
    assert values(LLAMA_FACTORY, keys, target) == [value]


@pytest.mark.parametrize(
    ("key", "keys"),
    [
        ("finetuning_type", {"finetuning_type": "freeze"}),
        ("quantization_bit", {"quantization_bit": 8}),
        ("val_size", {"val_size": 100}),
        ("rope_scaling", {"rope_scaling": "yarn"}),
        ("use_galore", {"use_galore": True}),
        ("adapter_name_or_path", {"adapter_name_or_path": "a,b"}),
    ],
)
def test_what_no_job_says(key, keys):
    assert outcome(LLAMA_FACTORY, key, keys) == "not carried"
