"""Launch commands are found in scripts, and the launchers' options are divided from the script's arguments as they do it."""

from __future__ import annotations

import argparse

import pytest

from toolkit.user_files.commands import SWITCHES, launch_commands


def switches_of(parser):
    names = {name for action in parser._actions if action.nargs == 0 for name in action.option_strings}
    return {name[2:].replace("-", "_") for name in names if name.startswith("--")}


@pytest.mark.full
def test_the_options_without_a_value_are_those_of_the_launchers(monkeypatch):
    from accelerate.commands.launch import launch_command_parser
    from deepspeed.launcher import runner
    from torch.distributed.run import get_args_parser

    parsers = []
    monkeypatch.setattr(
        argparse.ArgumentParser, "parse_args", lambda parser, args=None: parsers.append(parser) or argparse.Namespace()
    )
    runner.parse_args(["train.py"])
    found = {"accelerate": launch_command_parser(), "torchrun": get_args_parser(), "deepspeed": parsers[0]}
    assert {name: switches_of(parser) for name, parser in found.items()} == {
        name: set(switches) for name, switches in SWITCHES.items()
    }


@pytest.mark.parametrize(
    ("text", "launcher", "options", "script", "arguments"),
    [
        ("python train.py --lr -1 --x=a=b", "python", {}, "train.py", {"lr": "-1", "x": "a=b"}),
        ("python -m torch.distributed.run --nnodes 2 t.py", "torchrun", {"nnodes": "2"}, "t.py", {}),
        ("torchrun --standalone --nproc-per-node=2 -m a.b --fp16", "torchrun", {}, "a.b", {"fp16": None}),
        ("deepspeed -H hosts --no_ssh t.py --betas 0.9 0.95", "deepspeed", {"hostfile": "hosts"}, "t.py", {}),
        ("N=4; time accelerate launch --num_processes ${N} t.py > log 2>&1 &", "accelerate", {"num_processes": "4"}, "t.py", {}),
        ("trl sft --config c.yaml --bf16 true", "trl", {}, "sft", {"config": "c.yaml", "bf16": "true"}),
        ("if true; then\n  accelerate launch t.py \\\n    --bf16 # on\nfi", "accelerate", {}, "t.py", {"bf16": None}),
        ("ARGS=(--a 1)\ncat <<END\ntorchrun no.py\nEND\ntorchrun yes.py", "torchrun", {}, "yes.py", {}),
        ("env X=1 srun -n2 sh -c 'torchrun t.py --y'", "torchrun", {}, "t.py", {"y": None}),
    ],
)  # fmt: skip
def test_commands_are_divided(text, launcher, options, script, arguments):
    (command,) = launch_commands(text)
    assert (command.launcher, command.script) == (launcher, script)
    assert options.items() <= {each.name: each.value for each in command.options}.items()
    assert arguments.items() <= {each.name: each.value for each in command.arguments}.items()


@pytest.mark.parametrize(
    "text", ["echo train.py", "pip install deepspeed", "cd /x && ls", "python", "'", '"$(', "${", "$((1+"]
)
def test_other_commands_start_no_training(text):
    assert [command.script for command in launch_commands(text) if command.script.endswith(".py")] == []


def test_a_variable_behind_a_value_is_no_part_of_it():
    (command,) = launch_commands("torchrun train.py --config c.yaml $MORE --lr $RATE")
    assert [(each.value, each.is_known) for each in command.arguments] == [("c.yaml", True), ("$RATE", False)]


def test_what_only_the_shell_knows_is_marked():
    (command,) = launch_commands('torchrun --nnodes $N --node_rank `hostname` t.py --out "$(date)" --lr ${LR:-1e-5}')
    assert [each.is_known for each in command.options] == [False, False]
    assert [(each.value, each.is_known) for each in command.arguments] == [("$(date)", False), ("1e-5", True)]
