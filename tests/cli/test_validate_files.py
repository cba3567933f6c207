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


@pytest.mark.parametrize("target", ["bad.json", "./link.json", "notes.txt"])
def test_a_sarif_log_replaces_no_input_and_no_other_file(folder, capsys, target):
    (folder / "link.json").symlink_to("bad.json")
    (folder / "notes.txt").write_text("mine")
    before = {path.name: path.read_text() for path in folder.iterdir()}
    assert main(["validate", "bad.json", "--fix", "--sarif", target]) == 2
    shown = capsys.readouterr()
    assert "train_batch_size='8'" in shown.err
    assert shown.err.splitlines()[-1].endswith("[EMIT_WOULD_OVERWRITE]")
    assert {path.name: path.read_text() for path in folder.iterdir()} == before


def test_a_sarif_log_replaces_an_older_one(folder):
    assert [main(["validate", name, "--sarif", "log.sarif"]) for name in ("bad.json", "ds.json")] == [2, 0]
    assert json.loads(Path("log.sarif").read_text())["runs"][0]["results"] == []


@pytest.mark.parametrize("target", ["none/log.sarif", "folder", "bad.json/log.sarif"])
def test_what_cannot_be_written_is_named_behind_the_findings(folder, capsys, target):
    (folder / "folder").mkdir()
    assert main(["validate", "bad.json", "--fix", "--sarif", target]) != 0
    shown = capsys.readouterr()
    assert "train_batch_size='8'" in shown.err
    assert re.search(rf"error: {target} cannot be written: .*\[OUTPUT_WRITE\]$", shown.err.strip())
    assert not (folder / "bad.fixed.json").exists()
    assert main(["validate", "bad.json", "--fix", "--sarif", target, "--json"]) != 0
    result = json.loads(capsys.readouterr().out)
    assert [each["code"] for each in result["findings"]] == ["DEEPSPEED_VALUE"]
    assert ([each["code"] for each in result["problems"]], result["fixed"]) == (["OUTPUT_WRITE"], {})


def test_a_corrected_copy_that_cannot_be_written_is_named(folder, capsys):
    name = f"{'a' * 248}.json"  # the copy's name is longer than a file system allows
    (folder / name).write_text((folder / "bad.json").read_text())
    assert main(["validate", name, "--fix"]) != 0
    shown = capsys.readouterr()
    assert "train_batch_size='8'" in shown.err
    assert f"{'a' * 248}.fixed.json cannot be written" in shown.err


def test_links_that_name_each_other(folder, capsys):
    (folder / "one").symlink_to("two")
    (folder / "two").symlink_to("one")
    assert main(["validate", "one"]) == 2
    assert capsys.readouterr().err.strip().endswith("[FILE_UNREADABLE]")


def test_fix_says_what_it_changed_and_what_is_left(folder, capsys):
    (folder / "bad.json").write_text(json.dumps(SOUND | {"train_batch_size": "8", "fp16": {"enabled": True}}))
    assert main(["validate", "bad.json", "--fix"]) == 2
    said = capsys.readouterr().out
    assert 'bad.json: train_batch_size: "8" → 8 (' in said
    assert "left: error: bad.json" in said


def test_the_log_is_printed(folder, capsys):
    assert main(["validate", "bad.json", "--sarif", "-"]) == 2
    assert json.loads(capsys.readouterr().out)["version"] == "2.1.0"
    assert not Path("-").exists()
    assert main(["validate", "bad.json", "--sarif", "-", "--json"]) == 2
    assert "leave one out" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text", ["", '{"bf16": {"enabled": true},}', '{\n// zero 3\n"zero_optimization": {"stage": 3}}']
)
def test_json_that_cannot_be_read_is_no_job(folder, capsys, text):
    (folder / "broken.json").write_text(text)
    assert main(["validate", "broken.json"]) == 2
    assert "[DEEPSPEED_SYNTAX]" in capsys.readouterr().err
