"""Files are told apart by their keys; the tables know every key of the installed libraries."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import yaml
from readings import read

from toolkit.migration.accelerate import ACCELERATE
from toolkit.migration.deepspeed import DEEPSPEED
from toolkit.migration.detection import TABLES, joined_table, table_of
from toolkit.migration.launcher import LAUNCHER
from toolkit.migration.trainer import TRAINER
from toolkit.migration.trl import TRL

FILES = Path(__file__).with_name("files")
TOOLS = {
    "axolotl": "axolotl",
    "llama-factory": "LLaMA-Factory",
    "swift": "ms-swift",
    "trl": "TRL",
    "trainer": "Trainer",
    "accelerate": "Accelerate",
    "zero": "DeepSpeed",
}


@pytest.mark.parametrize(
    "path", [path for path in FILES.iterdir() if path.suffix in (".yaml", ".json")], ids=lambda path: path.name
)
def test_a_file_is_of_its_tool(path):
    keys = json.loads(path.read_text()) if path.suffix == ".json" else yaml.safe_load(path.read_text())
    assert table_of(keys).tool == next(tool for begins, tool in TOOLS.items() if path.name.startswith(begins))


def test_few_keys_decide():
    assert table_of({"zero_optimization": {"stage": 1}}) is DEEPSPEED
    assert table_of({"bf16": {"enabled": True}}) is DEEPSPEED
    assert table_of({"bf16": True, "output_dir": "x"}) is TRAINER
    assert table_of({"model": "m", "cluster": {"gpu": "x"}}) is None
    assert table_of({}) is None


def test_trainers_arguments_go_with_those_of_a_tool_over_it():
    assert joined_table(TRAINER, TRL) is TRL
    assert joined_table(TRL, TRAINER) is TRL
    assert joined_table(TRL, next(table for table in TABLES if table.tool == "axolotl")) is None


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("TrainingArguments", TRAINER),
        ("SFTConfig", TRL),
        ("ModelConfig", TRL),
        ("ScriptArguments", TRL),
        ("DatasetMixtureConfig", TRL),
    ],
)
def test_every_field_of_the_argument_classes_is_known(name, table):
    from toolkit.user_files.arguments import argument_classes

    assert [field for field in argument_classes()[name] if field not in table.names] == []


def test_every_key_of_accelerate_is_known():
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser

    assert [field.name for field in dataclasses.fields(ClusterConfig) if field.name not in ACCELERATE.names] == []
    leaves = {key.rpartition(".")[2] for key in ACCELERATE.keys}
    own = {"help", "training_script", "training_script_args"}
    assert [action.dest for action in launch_command_parser()._actions if action.dest not in leaves | own] == []


def test_every_option_of_torchrun_is_known():
    from torch.distributed.run import get_args_parser

    own = {"help", "training_script", "training_script_args"}
    assert [action.dest for action in get_args_parser()._actions if action.dest not in LAUNCHER.keys | own] == []


def test_every_key_of_deepspeed_is_known():
    from toolkit.deepspeed_spec.schema import schema_paths

    paths = list(schema_paths())
    for path in paths:
        if any(other.startswith(f"{path}.") for other in paths):
            continue
        keys: dict = {}
        node = keys
        *sections, leaf = path.split(".")
        for section in sections:
            node = node.setdefault(section, {})
        node[leaf] = 7
        _, entries = read(DEEPSPEED, keys, deepspeed=keys)
        assert "known here" not in entries[path].reason, path


def test_arguments_of_an_example_script_are_trainers():
    keys = {
        "model_name_or_path": "gpt2",
        "dataset_name": "wikitext",
        "dataset_config_name": "a",
        "do_train": True,
        "block_size": 512,
    }
    assert table_of(keys).tool == "Trainer"
    assert table_of({"model_name_or_path": "gpt2", "dataset_name": "a", "output_dir": "o"}).tool == "TRL"
