"""TRL's keys mean in a job what they mean to `trl sft`."""

from __future__ import annotations

import pytest
from readings import outcome, read, values

from toolkit.migration.trl import TRL


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, ["none", None]),
        ({"packing": True}, ["separated", "truncate"]),
        ({"packing": True, "packing_strategy": "bfd_split"}, ["separated", None]),
        ({"packing": True, "packing_strategy": "wrapped"}, ["wrapped", None]),
        ({"packing": False, "padding_free": True}, ["none", None]),
    ],
)
def test_packing(keys, expected):
    assert values(TRL, keys, "data.packing", "data.long_rows") == expected


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, ["full", None]),
        ({"use_peft": True}, ["lora", ["q_proj", "v_proj"]]),
        ({"use_peft": True, "lora_target_modules": ["all-linear"]}, ["lora", "all-linear"]),
        (
            {"use_peft": True, "load_in_4bit": True, "lora_target_modules": "q_proj k_proj"},
            ["qlora", ["q_proj", "k_proj"]],
        ),
        (
            {"use_peft": True, "load_in_8bit": True, "lora_target_modules": r".*\.(q|k)_proj"},
            ["lora", r".*\.(q|k)_proj"],
        ),
    ],
)
def test_adapters(keys, expected):
    assert values(TRL, keys, "train.method", "train.lora.target_modules") == expected


def test_8_bit_is_not_carried():
    assert outcome(TRL, "load_in_8bit", {"use_peft": True, "load_in_8bit": True}) == "not carried"
    assert outcome(TRL, "load_in_8bit", {"load_in_8bit": True}) == "not needed"
    assert (
        outcome(TRL, "bnb_4bit_quant_type", {"use_peft": True, "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"})
        == "not carried"
    )


@pytest.mark.parametrize(
    ("keys", "loss_on"),
    [({}, "all"), ({"assistant_only_loss": True}, "assistant"), ({"completion_only_loss": True}, "completion"), ({"completion_only_loss": False}, "all")],
)  # fmt: skip
def test_what_counts_in_the_loss(keys, loss_on):
    draft, _ = read(TRL, {"dataset_name": "a/b", **keys})
    assert draft.get("data.loss_on") == loss_on
    assert bool(draft.notes) == (not keys)  # what TRL decides by the columns is told


def test_data():
    keys = {
        "dataset_name": "a/b",
        "dataset_config": "c",
        "dataset_train_split": "t",
        "eval_strategy": "steps",
        "eval_steps": 5,
    }
    draft, _ = read(TRL, keys)
    assert draft.document()["data"] | {"packing": 0} == {
        "train": "a/b", "name": "c", "split": "t", "eval": "a/b", "eval_split": "test", "packing": 0
    }  # fmt: skip
    draft, entries = read(TRL, keys | {"eval_strategy": "no"})
    assert "eval" not in draft.document()["data"]
    assert entries["eval_steps"].outcome == "not needed"


def test_a_mixture():
    keys = {
        "datasets": [{"path": "a/b", "split": "t"}, {"path": "json", "data_files": "c.jsonl", "fraction": 0.5}],
        "dataset_text_field": "body",
    }
    draft, _ = read(TRL, keys)
    assert draft.get("data.sources") == [
        {"path": "a/b", "split": "t", "columns": {"text": "body"}},
        {"path": "c.jsonl", "columns": {"text": "body"}, "weight": 0.5},
    ]


def test_precision_is_bf16_unless_fp16_is_on():
    assert values(TRL, {}, "train.precision") == ["bf16"]
    assert values(TRL, {"fp16": True}, "train.precision") == ["fp16"]


def test_offloaded_activations():
    assert values(TRL, {"activation_offloading": True}, "parallel.offload") == ["activations-cpu"]
    assert (
        outcome(TRL, "activation_offloading", {"activation_offloading": True, "gradient_checkpointing": False})
        == "not carried"
    )
