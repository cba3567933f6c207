"""Commands as keys of tools and launchers."""

from __future__ import annotations

import pytest

from toolkit.migration.scripts import is_command, said_by


def said(text):
    found, problems = said_by(text, name="run.sh")
    assert not problems
    return [(each.table.tool, each.keys) for each in found]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "torchrun --nproc_per_node 4 train.py --output_dir o --bf16",
            [("the launcher", {"nproc_per_node": "4"}), ("Trainer", {"output_dir": "o", "bf16": True})],
        ),
        (
            "deepspeed --num_gpus=2 train.py --deepspeed --deepspeed_config ds.json --learning_rate 1e-5",
            [("the launcher", {"num_gpus": "2"}), ("Trainer", {"deepspeed": True, "deepspeed_config": "ds.json", "learning_rate": "1e-5"})],
        ),
        (
            "accelerate launch --num_processes 2 --zero_stage 3 --mixed_precision bf16 -m axolotl.cli.train a.yaml",
            [("Accelerate", {"num_processes": "2", "deepspeed_config": {"zero_stage": "3"}, "mixed_precision": "bf16", "module": True}), ("axolotl", {})],
        ),
        (
            "NPROC_PER_NODE=2 swift sft --model m --dataset a b",
            [("the launcher", {"NPROC_PER_NODE": "2"}), ("ms-swift", {"model": "m", "dataset": "a b", "<command>": "sft"})],
        ),
        ("FORCE_TORCHRUN=1 llamafactory-cli train a.yaml lora_rank=4", [("the launcher", {"FORCE_TORCHRUN": "1"}), ("LLaMA-Factory", {"lora_rank": "4"})]),
        ("trl sft --dataset_name d --num_processes 3 --lora_r 8", [("Accelerate", {"num_processes": "3"}), ("TRL", {"dataset_name": "d", "lora_r": "8"})]),
    ],
)  # fmt: skip
def test_a_command(text, expected):
    assert said(text) == expected


def test_files_that_a_command_names():
    found, _ = said_by("trl sft --config a.yaml --seed 3", name="run.sh")
    assert (found[0].files, found[0].keys) == ((("a.yaml", 1),), {"seed": "3"})


def test_what_only_the_shell_knows():
    found, _ = said_by("trl sft --dataset_name $1 --seed 3", name="run.sh")
    assert found[0].unread == {"dataset_name": "$1"}


def test_what_is_a_command():
    assert is_command("swift sft --model m")
    assert not is_command("a.yaml")
    assert not is_command("my config.yaml")
