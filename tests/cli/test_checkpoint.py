"""`toolkit checkpoint list` and `verify`."""

from __future__ import annotations

import json

import pytest
from hostile_files import agree

from toolkit.checkpoint.state import State
from toolkit.cli.app import main


@pytest.fixture
def run(tmp_path):
    for step in (10, 9):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        state = {"num_steps": 20, "zero_stage": 3, "world_size": 4, "train_batch_size": 8, "versions": {}}
        State(step=step, saved_at=1e9 + step, **state).save(folder)
        (folder / "plan.json").write_text(json.dumps({"job": {"parallel": {"pipeline": 2} if step == 10 else {}}}))
        (folder / "shard.pt").write_bytes(b"x" * 2**20)
        agree(folder)
    (tmp_path / "checkpoint-11").mkdir()
    return tmp_path


def test_list(run, capsys):
    assert main(["checkpoint", "list", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [row["step"] for row in found] == [9, 10]
    assert set(found[0]) == {
        "path",
        "step",
        "zero_stage",
        "world_size",
        "pipeline",
        "tensor",
        "bytes",
        "saved",
        "damaged",
    }
    assert [(row["pipeline"], row["tensor"]) for row in found] == [(1, 1), (2, 1)]
    assert found[0]["path"] == str(run / "checkpoint-9")
    assert found[0]["bytes"] > 2**20
    assert found[0]["saved"].startswith("2001-09-0")
    assert main(["checkpoint", "list", str(run)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[0].split() == ["step", "ZeRO", "ranks", "pipeline", "tensor", "size", "saved", "path"]
    assert lines[-1].split()[:5] == ["10", "3", "4", "2", "1"]
    assert lines[-1].rstrip().endswith(str(run / "checkpoint-10"))


def test_a_damaged_checkpoint_hides_no_other(run, capsys):
    (run / "checkpoint-9" / "state.json").write_text("{")
    assert main(["checkpoint", "list", str(run), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [(row["step"], row["damaged"], row["world_size"]) for row in rows] == [(9, True, None), (10, False, 4)]
    assert main(["checkpoint", "list", str(run)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[-2].split()[:2] == ["9", "damaged"]
    assert lines[-1].split()[:3] == ["10", "3", "4"]


BROKEN = {
    "one bit": ("state.json", lambda text: text.replace(b'"step": 9', b'"step": 8'), False),
    "plan": ("plan.json", lambda text: b"{", False),
    "not UTF-8": ("state.json", lambda text: b'{"step": "\xff"}', True),
    "UTF-16": ("state.json", lambda text: text.decode().encode("utf-16"), True),
    "nested": ("state.json", lambda text: b"[" * 10_000, True),
    "text for a time": ("state.json", lambda text: text.replace(b"1000000009.0", b'"yesterday"'), True),
    "1e300": ("state.json", lambda text: text.replace(b"1000000009.0", b"1e300"), True),
    "sources a list": ("state.json", lambda text: text.replace(b'"sources": {}', b'"sources": []'), True),
    "plan nested": ("plan.json", lambda text: b'{"job":' * 10_000, True),
    "manifest": ("manifest.json", lambda text: text.replace(b'"bytes": ', b'"bytes": Infinity'), False),
}


@pytest.mark.parametrize("name", BROKEN)
def test_whatever_is_broken_is_one_damaged_row(run, capsys, name):
    file, change, agrees = BROKEN[name]
    folder = run / "checkpoint-9"
    changed = change((folder / file).read_bytes())
    assert changed != (folder / file).read_bytes()
    (folder / file).write_bytes(changed)
    if agrees:  # made so, not damaged since
        agree(folder)
    assert main(["checkpoint", "list", str(run), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [(row["step"], row["damaged"], row["world_size"]) for row in rows] == [(9, True, None), (10, False, 4)]
    assert main(["checkpoint", "verify", str(folder), "--json"]) == 1
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert (problem["code"], str(folder / file) in problem["message"]) == ("CHECKPOINT_DAMAGED", True)


def test_list_of_nothing(tmp_path, capsys):
    assert main(["checkpoint", "list", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path} has no complete checkpoint\n"
    assert main(["checkpoint", "list", str(tmp_path / "absent")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "CHECKPOINT_NOT_FOUND" in captured.err


def test_a_name_that_the_system_refuses_is_bad_input(capsys):
    assert main(["checkpoint", "list", "x" * 300]) == 2
    assert main(["export", "x" * 300]) == 2
    assert capsys.readouterr().err.count("File name too long. Name another path. [PATH_UNREADABLE]") == 2


def test_verify(run, capsys):
    assert main(["checkpoint", "verify", str(run / "checkpoint-9")]) == 0
    assert "is complete: 3 files, 1.00 MiB, every checksum matches" in capsys.readouterr().out
    assert main(["checkpoint", "verify", str(run / "checkpoint-9"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["files"] == 3


def test_verify_names_the_damage(run, capsys):
    (run / "checkpoint-9" / "shard.pt").write_bytes(b"y" * 2**20)
    assert main(["checkpoint", "verify", str(run / "checkpoint-9")]) == 1
    assert "shard.pt has another SHA-256" in capsys.readouterr().err
    assert main(["checkpoint", "verify", str(run / "checkpoint-11"), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["problems"][0]["code"] == "CHECKPOINT_INCOMPLETE"


def test_verify_of_an_output_dir_names_what_is_inside(run, capsys):
    assert main(["checkpoint", "verify", str(run)]) == 2
    assert f"Name one of {run / 'checkpoint-10'}" in capsys.readouterr().err
