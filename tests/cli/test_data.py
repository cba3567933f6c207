"""`toolkit data`: the figures and rows of a job, as text and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.train_jobs import write_inputs, write_job
from toolkit.cli.app import main


def test_data_of_a_job(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data_command_records.py").write_text("def upper(record): return {'text': record['text'].upper()}")
    job = str(write_job(tmp_path, "job", data={"preprocess": "data_command_records:upper"}))
    assert main(["data", job, "--rows", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (row,) = found["rows"]
    text = "".join(text for text, _ in row["text"]).replace("<eos>", "")
    assert text == text.upper(), "the function beside the job file was found"
    assert main(["data", job, "--rows", "1"]) == 0
    shown = capsys.readouterr().out
    assert "".join(f"{{+{text}+}}" if learned else text for text, learned in row["text"]) in shown
    figures = found["train"]
    assert f"{figures['target_tokens']:,} of {figures['tokens']:,} tokens" in shown
    assert f"total {figures['document_tokens']['total']:,}" in shown
    sets = ["--set", "data.eval.few.path=data.jsonl", "--set", "data.eval.few.max_rows=3"]
    assert main(["data", job, "--rows", "0", "--json", *sets]) == 0
    assert json.loads(capsys.readouterr().out)["eval_sets"]["few"]["documents"] == 3
    assert main(["data", job, "--rows", "0", *sets]) == 0
    assert "eval few: text, packing wrapped" in capsys.readouterr().out
