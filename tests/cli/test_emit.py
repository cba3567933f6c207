"""`toolkit emit`, and what reads a job or a plan for every command."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from toolkit.cli.app import main

JOB = "model: llama-3.1-8b\ncluster: {gpu: h100-sxm-80gb, gpus_per_node: 4}\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


def emit(*options):
    return main(["emit", "job.yaml", "--out", "out", *options])


def test_it_names_each_file_and_its_state(folder, capsys):
    assert emit() == 0
    shown = capsys.readouterr().out
    assert "new        out/deepspeed.json\n" in shown
    assert emit("--set", "train.gradient_accumulation_steps=8") == 0
    shown = capsys.readouterr().out
    assert "rewritten  out/deepspeed.json\n" in shown
    assert "unchanged  out/accelerate.yaml\n" in shown


def test_json(folder, capsys):
    emit("--json")
    made = json.loads(capsys.readouterr().out)
    assert {file["state"] for file in made["files"]} == {"new"}
    assert all(Path(file["path"]).is_file() for file in made["files"])
    assert (made["folder"], made["removed"], made["left_out"]) == ("out", [], [])
    assert [problem["code"] for problem in made["untrainable"]] == ["TRAIN_NO_DATA", "MODEL_NO_WEIGHTS"]
    emit("--json", "--set", "train.gradient_checkpointing=0.5")
    made = json.loads(capsys.readouterr().out)
    assert "out/accelerate.yaml" in made["removed"]
    assert {entry["file"] for entry in made["left_out"]} >= {"accelerate.yaml", "training_arguments.json"}
    assert made["left_out"][0]["problems"][0]["code"] == "INTEGRATION_CHECKPOINTING"


def test_what_is_left_out_and_what_was_edited_is_said(folder, capsys):
    emit()
    Path("out/deepspeed.json").write_text("{}")
    capsys.readouterr()
    emit("--set", "train.gradient_checkpointing=0.5")
    captured = capsys.readouterr()
    assert "edited     out/deepspeed.json\n" in captured.out
    assert "removed    out/accelerate.yaml\n" in captured.out
    assert "deepspeed.json had been edited by hand" in captured.err
    files = "deepspeed-trainer.json, training_arguments.json, deepspeed-accelerate.json, accelerate.yaml"
    assert captured.err.count(f"no {files}: gradient_checkpointing=0.5") == 1


def test_it_says_what_validate_says(folder, capsys):
    """Of dimensions without weights, and of a data file that is not there, for which nothing is written."""
    (folder / "data.jsonl").write_text('{"text": "some words"}\n')
    with_data = ("--set", "data.train=data.jsonl")
    assert main(["validate", "job.yaml", *with_data]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "`toolkit train` would refuse it" in line]
    assert [re.findall(r"\[([A-Z_]+)\]", line) for line in said] == [["MODEL_NO_WEIGHTS", "TOKENIZER_NOT_FOUND"]]
    assert emit(*with_data) == 0
    assert [line for line in capsys.readouterr().err.splitlines() if "would refuse it" in line] == said
    assert "  torchrun)\n" not in Path("out/commands.sh").read_text()
    assert "  torchrun-script)\n" in Path("out/commands.sh").read_text()
    assert emit(*with_data, "--set", "model.init=random", "--set", "model.tokenizer=org/name") == 0
    assert "would refuse it" not in capsys.readouterr().err
    assert "  torchrun)\n" in Path("out/commands.sh").read_text()
    wrong = ("--out", "other", "--set", "data.train=absent.jsonl")
    assert main(["validate", "job.yaml", *wrong[2:]]) == 2
    said = capsys.readouterr().err
    assert main(["emit", "job.yaml", *wrong]) == 2
    assert capsys.readouterr().err == said
    assert not Path("other").exists()


def test_hosts(folder, capsys):
    assert emit("--set", "cluster.nodes=2", "--hosts", "a, b") == 0
    assert Path("out/hostfile").read_text() == "a slots=4\nb slots=4\n"
    assert emit("--hosts", "a,b") == 2
    assert "EMIT_HOSTS" in capsys.readouterr().err


def test_a_file_of_the_user_is_kept(folder, capsys):
    Path("deepspeed.json").write_text("mine")
    assert main(["emit", "job.yaml", "--out", "."]) == 2
    assert "EMIT_WOULD_OVERWRITE" in capsys.readouterr().err
    assert Path("deepspeed.json").read_text() == "mine"


def test_a_folder_that_cannot_be(folder, capsys):
    Path("out").write_text("a file")
    assert emit() == 3
    assert "EMIT_UNWRITABLE" in capsys.readouterr().err


def test_a_plan_whose_values_break_a_rule_is_not_emitted(folder, capsys):
    emit()
    plan = json.loads(Path("out/plan.json").read_text())
    plan["settings"]["sequence_length"] = 10**9
    for choice in plan["choices"]:
        if choice["key"] == "train.sequence_length":
            choice["value"] = 10**9
    Path("edited.json").write_text(json.dumps(plan))
    capsys.readouterr()
    assert main(["emit", "edited.json", "--out", "other"]) == 2
    assert "[SEQUENCE_LENGTH]" in capsys.readouterr().err
    assert not Path("other").exists()


def test_a_plan_that_was_cut_short_is_still_taken_for_a_plan(folder, capsys):
    emit()
    text = Path("out/plan.json").read_text()
    for name, content in (("plan.json", ""), ("cut.json", text[: len(text) // 2])):
        Path(name).write_text(content)
        capsys.readouterr()
        assert main(["validate", name]) == 2
        assert "[PLAN_UNREADABLE]" in capsys.readouterr().err


def test_out_has_the_form_of_a_path(folder, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(folder / "home"))
    assert main(["emit", "job.yaml", "--out=~/here"]) == 0
    assert (folder / "home" / "here" / "plan.json").is_file()
    before = sorted(folder.iterdir())
    for out in ("", "a\0b", "a\nb", "\udcff", "a" * 300, "~nobody-here/x"):
        capsys.readouterr()
        assert main(["emit", "job.yaml", f"--out={out}", "--json"]) == 2
        (problem,) = json.loads(capsys.readouterr().out)["problems"]
        assert (problem["code"], problem["key"]) == ("USAGE", "--out")
    assert sorted(folder.iterdir()) == before


def test_a_link_of_a_persons_own_is_not_replaced(folder):
    Path("out").mkdir()
    Path("out/plan.json").symlink_to("nowhere")
    assert main(["emit", "job.yaml", "--out", "out"]) != 0
    assert [entry.name for entry in Path("out").iterdir()] == ["plan.json"]
    assert Path("out/plan.json").is_symlink()
