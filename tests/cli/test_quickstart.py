"""`toolkit quickstart`: the whole journey, on a terminal as a person has it and in a pipe."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from quick_python import quick_python
from ranks import QUICK
from train_jobs import curve

from toolkit.checkpoint.discovery import list_checkpoints
from toolkit.checkpoint.manifest import verify
from toolkit.cli.app import main

pytestmark = pytest.mark.gloo
pty = pytest.importorskip("pty")
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def run_on_a_terminal(folder: Path, *arguments: str) -> tuple[int, str]:
    """Runs `toolkit ARGUMENTS` in a pseudo-terminal of 100 columns; gives exit code and all that was shown."""
    python = quick_python()
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(folder)
        os.environ |= {"COLUMNS": "100", "TERM": "xterm-256color", **QUICK}
        os.environ.pop("NO_COLOR", None)
        os.execv(python, [python, "-m", "toolkit", *arguments])
    shown = b""
    while True:
        try:
            piece = os.read(terminal, 65536)
        except OSError:  # Linux reports the other end's close so
            break
        if not piece:
            break
        shown += piece
    os.close(terminal)
    _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status), shown.decode()


@pytest.fixture(scope="module")
def journey(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quickstart")
    code, shown = run_on_a_terminal(folder, "quickstart", "--cpu", "--processes", "1", "--out", "out")
    return folder / "out", code, shown


def test_the_whole_journey(journey):
    out, code, shown = journey
    assert code == 0, shown
    losses = curve(out / "run")
    assert sorted(losses) == list(range(1, 61))
    assert losses[60][0] < losses[1][0] - 1
    last = list_checkpoints(out / "run")[-1]
    assert last.name == "checkpoint-60"
    verify(last)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in (out / "run/export").iterdir()
    }
    assert (out / "run/configs/deepspeed.json").exists()


def test_what_a_person_sees(journey):
    _, _, shown = journey
    assert "\x1b[1m[1/5]" in shown, "headings stand out"
    assert "━" in shown, "a bar while it trains"
    assert re.search(r"loss \d\.\d{4}  [\d,]+ tokens/s  [\d.]+ MiB +[\d.]+ s left", CONTROL.sub("", shown))
    # What stays when the bar has gone: each line after its last rewriting.
    lines = [line.rstrip("\r").rpartition("\r")[2].strip() for line in CONTROL.sub("", shown).split("\n")]
    kinds = ("[", "starting ", "data: ", "model: ", "step ", "saved ", "resumed from ")
    fields = ("job file", "plan", "configs", "metrics", "checkpoint", "export", "checked", "time")
    assert [line for line in lines if line and not line.startswith((*kinds, *fields))] == []
    assert [line.split("]")[0] for line in lines if line.startswith("[")] == [f"[{number}/5" for number in range(1, 6)]
    assert any(line.startswith("checked") and "equal the trained model's" in line for line in lines)
    assert any(line.startswith("resumed from out/run/checkpoint-40 at step 40") for line in lines)


def test_a_folder_that_is_not_its_own_is_kept(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    for options in ((), ("--overwrite",)):
        assert main(["quickstart", "--cpu", "--out", str(tmp_path), *options, "--json"]) == 2
        assert json.loads(capsys.readouterr().out)["problems"][0]["code"] == "OUTPUT_EXISTS"
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_its_job_file_is_sound(journey, capsys, monkeypatch):
    out, _, _ = journey
    monkeypatch.chdir(out.parent)
    assert main(["validate", "out/job.yaml"]) == 0
    assert (out / "job.yaml").read_text().startswith("# Run with: toolkit train ")
    assert main(["quickstart", "--out", str(out)]) == 2
    assert "replace it with --overwrite" in capsys.readouterr().err
