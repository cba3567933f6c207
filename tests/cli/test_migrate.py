"""`toolkit migrate` writes the job to stdout or a file, and what it does not say to stderr."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from toolkit.cli.app import main
from toolkit.config.yaml_text import parse_yaml

FILES = Path(__file__).parents[1] / "migration" / "files"


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.chdir(FILES)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_the_job_on_stdout_and_the_rest_on_stderr(capsys):
    assert main(["migrate", "trl-sft.yaml", "--gpu", "h100-sxm-80gb", "--num-gpus", "2"]) == 0
    out, err = capsys.readouterr()
    job = parse_yaml(out, name="stdout")
    assert job["cluster"] == {"gpu": "h100-sxm-80gb", "gpus_per_node": 2}
    assert "of trl-sft.yaml, zero2.json" in err
    assert "not carried: trl-sft.yaml:29 run_name=first" in err
    assert "learning_rate=" not in err


def test_every_key_with_all(capsys):
    main(["migrate", "trl-sft.yaml", "--all"])
    err = capsys.readouterr().err
    assert "carried train.learning_rate: trl-sft.yaml:12 learning_rate=2e-05" in err
    assert "the job is not complete: cluster.gpu is missing" in err or "cluster is missing" in err


def test_a_written_job_is_valid_and_is_not_overwritten(tmp_path, capsys):
    job = tmp_path / "job.yaml"
    command = [
        "migrate",
        "trainer-arguments.json",
        "accelerate-deepspeed.yaml",
        "--gpu",
        "h100-sxm-80gb",
        "--model",
        "llama-3.2-1b",
        "--out",
        str(job),
    ]
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert f"wrote {job}; `toolkit validate {job}` checks it" in err
    assert main(["validate", str(job)]) == 0
    before = job.read_text()
    assert main(command) == 2
    assert "EMIT_WOULD_OVERWRITE" in capsys.readouterr().err
    assert job.read_text() == before


def test_json(capsys):
    assert main(["migrate", "axolotl-fsdp2.yaml", "--gpu", "h100-sxm-80gb", "--nodes", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"files", "job", "out", "counts", "keys", "notes", "problems"}
    assert found["files"] == [{"path": "axolotl-fsdp2.yaml", "tool": "axolotl"}]
    assert sum(found["counts"].values()) == len(found["keys"])
    (lost,) = [key for key in found["keys"] if key["key"] == "xformers_attention"]
    assert (lost["outcome"], lost["line"], lost["value"]) == ("not carried", 29, True)
    assert "flash_attention_2" in lost["fix"]


def test_a_bad_file_is_an_error_without_output(tmp_path, capsys):
    (tmp_path / "a.yaml").write_text("colour: red\n")
    assert main(["migrate", str(tmp_path / "a.yaml"), "--out", str(tmp_path / "job.yaml"), "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert [problem["code"] for problem in found["problems"]] == ["MIGRATE_UNKNOWN"]
    assert not (tmp_path / "job.yaml").exists()
