"""Corrected copies stand beside the originals, keep comments, and are what the check asks for."""

from __future__ import annotations

import json

import pytest
import yaml

from toolkit.user_files.check import check_files
from toolkit.user_files.correct import corrected, corrected_copies

ENGINE = """{
    "train_micro_batch_size_per_gpu": "4",
    "gradient_cliping": 1.0,
    "compile": {"disable": false, "backend": "inductor"},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "5e8"}
}
"""
CLUSTER = """# cluster A
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED  # not FSDP
mixed_precision: bf16
num_processes: 8
deepspeed_config:
  deepspeed_config_file: ds.json
  zero3_init_flag: 'false'
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fix(*names):
    report = check_files(names)
    texts, after, _ = corrected(report)
    copies = corrected_copies(report, texts)
    for path, text in copies.values():
        path.write_text(text)
    return report, after, {name: path for name, (path, _) in copies.items()}


def test_both_files_are_corrected_and_name_each_other(folder):
    (folder / "ds.json").write_text(ENGINE)
    (folder / "acc.yaml").write_text(CLUSTER)
    report, after, copies = fix("acc.yaml", "ds.json")
    assert report.count("error") == 5
    assert after.count("error") == after.count("warning") == 0
    assert {name: path.name for name, path in copies.items()} == {
        "acc.yaml": "acc.fixed.yaml",
        "ds.json": "ds.fixed.json",
    }
    assert (folder / "ds.json").read_text() == ENGINE
    assert (folder / "acc.yaml").read_text() == CLUSTER
    assert json.loads((folder / "ds.fixed.json").read_text()) == {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 500_000_000},
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
    }
    text = (folder / "acc.fixed.yaml").read_text()
    assert text == CLUSTER.replace("mixed_precision: bf16\n", "").replace("ds.json", "ds.fixed.json")
    assert check_files(["acc.fixed.yaml", "ds.fixed.json"]).is_sound


def test_no_file_is_written_over(folder):
    (folder / "ds.json").write_text(ENGINE)
    (folder / "ds.fixed.json").write_text("mine")
    _, _, copies = fix("ds.json")
    assert copies["ds.json"].name == "ds.fixed-2.json"
    assert (folder / "ds.fixed.json").read_text() == "mine"


def test_yaml_keeps_its_values_and_comments(folder):
    text = (
        "# mine\noutput_dir: out # here\nlearning_rate: 2e-5\nrun_name: 1:30:00\nseed: 0x10\nevaluation_strategy: no\n"
    )
    (folder / "args.yaml").write_text(text)
    _, after, copies = fix("args.yaml")
    made = copies["args.yaml"].read_text()
    assert made.startswith("# mine\noutput_dir: out # here\n")
    assert yaml.safe_load(made)["learning_rate"] == 2e-5
    assert (yaml.safe_load(made)["seed"], yaml.safe_load(made)["eval_strategy"]) == (16, "no")
    assert after.is_sound


def test_lines_that_the_launcher_cannot_read_are_left_out(folder):
    (folder / ".deepspeed_env").write_text("# ours\nNCCL_DEBUG=INFO\n\nA=b\n")
    _, after, copies = fix(".deepspeed_env")
    assert copies[".deepspeed_env"].name == ".deepspeed_env.fixed"
    assert copies[".deepspeed_env"].read_text() == "NCCL_DEBUG=INFO\nA=b\n"
    assert after.is_sound


def test_what_only_the_user_can_decide_is_left(folder):
    (folder / "ds.json").write_text('{"train_batch_size": 8, "fp16": {"enabled": true}, "bf16": {"enabled": true}}')
    report, after, copies = fix("ds.json")
    assert copies == {}
    assert report.found == after.found != ()


def test_json_keeps_its_form_and_each_change_is_said(folder):
    text = '{\n   "train_batch_size": "8",\n   "gradient_cliping": 1.0,\n   "optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.95], "lr": 1e-5}},\n   "bf16": {"enabled": true},\n   "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8}\n}\n'
    (folder / "ds.json").write_text(text)
    texts, _, changes = corrected(check_files(["ds.json"]))
    wanted = text.replace('"8"', "8").replace('   "gradient_cliping": 1.0,\n', "")
    assert texts["ds.json"] == wanted.replace("5e8}\n", '5e8},\n   "gradient_clipping": 1.0\n')
    assert [(each.key, each.old, each.new) for each in changes] == [
        ("train_batch_size", '"8"', "8"),
        ("gradient_cliping", "1.0", ""),
        ("gradient_clipping", "", "1.0"),
    ]
    assert "is not a key of DeepSpeed" in changes[1].reason
    assert str(changes[1]).startswith("ds.json: gradient_cliping: deleted, was 1.0 (")
