"""`toolkit validate FILE…`: the report on a user's own files, its exit codes and outputs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from toolkit.cli.app import main

SOUND = {"train_batch_size": 8, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
JOB = "model: llama-3.1-8b\ncluster: {gpu: h100-sxm-80gb, gpus_per_node: 4}\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text(json.dumps(SOUND))
    (tmp_path / "bad.json").write_text(json.dumps(SOUND | {"train_batch_size": "8"}))
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


def test_a_sound_file(folder, capsys):
    assert main(["validate", "ds.json"]) == 0
    assert capsys.readouterr().out == "ds.json: a DeepSpeed configuration\nno problems\n"


def test_a_wrong_file(folder, capsys):
    assert main(["validate", "bad.json"]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("error: bad.json, line 1: train_batch_size='8' (str) is not valid (deepspeed ")
    assert shown.out.endswith("1 error, 0 warnings, 0 notes\n")


def test_json(folder, capsys):
    assert main(["validate", "bad.json", "--json", "--fix"]) == 2
    result = json.loads(capsys.readouterr().out)
    assert result["files"] == [{"name": "bad.json", "kind": "deepspeed"}]
    (found,) = result["findings"]
    assert (found["level"], found["code"], found["line"], found["value"]) == ("error", "DEEPSPEED_VALUE", 1, "8")
    assert (result["fixed"], result["after_fix"]) == ({"bad.json": "bad.fixed.json"}, [])
    assert json.loads(Path("bad.fixed.json").read_text()) == SOUND


def test_a_job_among_files_is_checked_as_a_job(folder, capsys):
    (folder / "job.yaml").write_text(JOB + "train: {precison: bf16}\n")
    assert main(["validate", "ds.json", "job.yaml", "--json"]) == 2
    (found,) = json.loads(capsys.readouterr().out)["findings"]
    assert (found["file"], found["code"], found["line"]) == ("job.yaml", "KEY_UNKNOWN", 3)


def test_a_quoted_command(folder, capsys):
    assert main(["validate", "accelerate launch --num_processes 8 train.py --bf16 --fp16"]) == 2
    assert "fp16 and bf16 are both on" in capsys.readouterr().err


def test_sarif_is_written(folder, capsys):
    assert main(["validate", "bad.json", "--sarif", "log.sarif"]) == 2
    assert json.loads(Path("log.sarif").read_text())["runs"][0]["results"][0]["ruleId"] == "DEEPSPEED_VALUE"
    assert main(["validate", "bad.json", "--sarif", "absent/log.sarif"]) in (2, 3)


@pytest.mark.parametrize("options", [["--explain"], ["--set", "a=1"]])
def test_options_of_a_job_do_not_go_with_files(folder, capsys, options):
    assert main(["validate", "ds.json", *options]) == 2
    assert "it belongs to one job file" in capsys.readouterr().err


def test_a_file_of_another_tool_says_whose_it_is(folder, capsys):
    (folder / "axolotl.yml").write_text("base_model: x\nmicro_batch_size: 1\nsequence_len: 512\n")
    assert main(["validate", "axolotl.yml"]) == 2
    assert "is a configuration of axolotl" in capsys.readouterr().err


def test_the_hook_of_pre_commit_checks_what_it_names():
    (hook,) = yaml.safe_load((Path(__file__).parents[2] / ".pre-commit-hooks.yaml").read_text())
    assert (hook["id"], hook["entry"]) == ("toolkit-validate", "toolkit validate")
    names = (
        "configs/ds_config.json",
        "zero3.json",
        "accelerate_config.yaml",
        "hostfile",
        "a/.deepspeed_env",
        "run.sbatch",
    )
    assert all(re.search(hook["files"], name) for name in names)
    assert not any(re.search(hook["files"], name) for name in ("package.json", "mkdocs.yml", "train.py"))
