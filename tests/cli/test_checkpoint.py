"""`toolkit checkpoint list`, `inspect`, `verify` and `prune`."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from hostile_files import agree

from toolkit.checkpoint.state import State
from toolkit.cli.app import main
from toolkit.config.loader import parse_job
from toolkit.planning.resolve import resolve


@pytest.fixture
def run(tmp_path):
    for step in (10, 9):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        state = {"num_steps": 20, "zero_stage": 3, "world_size": 4, "train_batch_size": 8, "versions": {}}
        State(step=step, saved_at=1e9 + step, **state).save(folder)
        (folder / "plan.json").write_text(json.dumps({"job": {"parallel": {"pipeline": 2} if step == 10 else {}}}))
        (folder / "shard.pt").write_bytes(b"x" * 2**20)
        (folder / f"global_step{step}").mkdir()
        torch.save({"weight": torch.zeros(1000)}, folder / f"global_step{step}" / "mp_rank_00_model_states.pt")
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


def test_one_that_lost_its_manifest_is_shown(run, capsys):
    (run / "checkpoint-10" / "manifest.json").unlink()
    assert main(["checkpoint", "list", str(run), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [(row["step"], row["damaged"]) for row in rows] == [(10, True), (9, False)]
    assert main(["checkpoint", "verify", str(run / "checkpoint-10")]) == 1
    assert "manifest.json is missing" in capsys.readouterr().err


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
    assert "is complete: 4 files, 1.01 MiB, every size and index matches" in capsys.readouterr().out
    assert main(["checkpoint", "verify", str(run / "checkpoint-9"), "--deep"]) == 0
    assert "is complete: 4 files, 1.01 MiB, every checksum matches" in capsys.readouterr().out
    assert main(["checkpoint", "verify", str(run / "checkpoint-9"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["files"], found["deep"]) == (4, False)


def test_verify_names_the_damage(run, capsys):
    (run / "checkpoint-9" / "shard.pt").write_bytes(b"y" * 2**20)
    assert main(["checkpoint", "verify", str(run / "checkpoint-9")]) == 1
    assert "shard.pt has another SHA-256" in capsys.readouterr().err
    assert main(["checkpoint", "verify", str(run / "checkpoint-11"), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["problems"][0]["code"] == "CHECKPOINT_INCOMPLETE"


def test_verify_of_an_output_dir_names_what_is_inside(run, capsys):
    assert main(["checkpoint", "verify", str(run)]) == 2
    assert f"Name one of {run / 'checkpoint-10'}" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["a tensor", "the index", "the size", "another step's"])
def test_verify_reads_little_or_all(run, capsys, where):
    """A bit of a tensor is seen by `--deep`, and by whoever reads it; the rest in milliseconds."""
    folder = run / "checkpoint-9"
    path = folder / "global_step9" / "mp_rank_00_model_states.pt"
    content = bytearray(path.read_bytes())
    if where == "another step's":
        torch.save({"weight": torch.ones(1000)}, path)
        assert path.stat().st_size == len(content)
    elif where == "the size":
        path.write_bytes(content[:-1])
    else:
        content[len(content) // 2 if where == "a tensor" else -40] ^= 1
        path.write_bytes(content)
    seen = int(where != "a tensor")
    assert main(["checkpoint", "verify", str(folder)]) == seen
    capsys.readouterr()
    assert main(["checkpoint", "verify", str(folder), "--deep", "--json"]) == 1
    codes = {problem["code"] for problem in json.loads(capsys.readouterr().out)["problems"]}
    assert codes == {"CHECKPOINT_DAMAGED"}


@pytest.fixture
def described(tmp_path):
    """A checkpoint of the files that `inspect` reads, of two stages by two tensor ranks."""
    job = {
        "model": "quickstart-llama",
        "cluster": {"gpu": "a100-sxm-40gb", "gpus_per_node": 8},
        "train": {"max_steps": 20, "output_dir": str(tmp_path)},
        "parallel": {"pipeline": 2, "tensor": 2, "zero_stage": 1},
    }
    plan = resolve(parse_job(job))
    folder = tmp_path / "checkpoint-5"
    (folder / "global_step5").mkdir(parents=True)
    (folder / "global_step5" / "mp_rank_00_model_states.pt").write_bytes(b"x" * 1000)
    state = {"num_steps": 20, "zero_stage": 1, "world_size": 8, "train_batch_size": 8, "versions": {"torch": "2.0"}}
    State(step=5, saved_at=1e9, **state).save(folder)
    (folder / "plan.json").write_text(plan.to_json())
    return agree(folder)


def test_inspect(described, capsys):
    assert main(["checkpoint", "inspect", str(described), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    wanted = {"tag": "global_step5", "step": 5, "num_steps": 20, "strategy": "zero", "zero_stage": 1, "world_size": 8}
    wanted |= {"pipeline": 2, "data": 2, "tensor": 2, "method": "full", "precision": "bf16", "has_optimizer": True}
    assert {key: found[key] for key in wanted} == wanted
    assert found["bytes_by_kind"]["engine"] == 1000
    assert not any("DeepSpeed" in text for text in found["loads"]), "its own loader knows no stages of ours"
    assert main(["checkpoint", "inspect", str(described.parent)]) == 0
    out = capsys.readouterr().out
    assert "ZeRO-1, 8 rank(s): pipeline 2 × data 2 × tensor 2" in out
    assert f"toolkit export {described}" in out


def test_inspect_of_what_is_none(tmp_path, described, capsys):
    (described / "plan.json").write_text("{}")
    for path, code in ((described, "CHECKPOINT_DAMAGED"), (tmp_path / "no", "CHECKPOINT_NOT_FOUND")):
        assert main(["checkpoint", "inspect", str(path), "--json"]) == 2
        (problem,) = json.loads(capsys.readouterr().out)["problems"]
        assert problem["code"] == code


def _prune(capsys, run, *options):
    assert main(["checkpoint", "prune", str(run), "--json", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    return [row["path"].rpartition("-")[2] for row in found["removed"]], {
        row["path"].rpartition("-")[2]: row["reason"] for row in found["kept"]
    }


def test_prune_keeps_the_newest_and_the_best(run, capsys):
    for step, hooks in ((12, {}), (13, {"best": {"metric": "eval_loss", "saved": {"value": 1.0, "step": 9}}})):
        folder = shutil.copytree(run / "checkpoint-10", run / f"checkpoint-{step}")
        (folder / "global_step10").rename(folder / f"global_step{step}")
        state = State.load(run / "checkpoint-10").model_copy(
            update={"step": step, "saved_at": 1e9 + step, "hooks": hooks}
        )
        state.save(folder)
        agree(folder)
    removed, kept = _prune(capsys, run, "--keep", "1")
    assert removed == ["10", "12"]
    assert kept == {"9": "the best", "13": "one of the newest 1"}
    assert (run / "checkpoint-10").exists(), "nothing is deleted without --yes"
    assert main(["checkpoint", "prune", str(run), "--keep", "1", "--yes"]) == 0
    assert "deleted" in capsys.readouterr().out
    assert sorted(path.name for path in run.iterdir()) == ["checkpoint-11", "checkpoint-13", "checkpoint-9"]
    assert _prune(capsys, run, "--keep", "1", "--yes") == ([], kept)


def test_prune_asks_the_last_whole_one_for_the_best(run, capsys):
    """Of hooks that keep something else under the same name it learns nothing."""
    for step, best in ((12, {"saved": {"value": 1.0, "step": 9}}), (13, {"saved": [9]})):
        folder = shutil.copytree(run / "checkpoint-10", run / f"checkpoint-{step}")
        (folder / "global_step10").rename(folder / f"global_step{step}")
        changed = {"step": step, "saved_at": 1e9 + step, "hooks": {"best": best}}
        State.load(run / "checkpoint-10").model_copy(update=changed).save(folder)
        agree(folder)
    assert _prune(capsys, run, "--keep", "1")[0] == ["9", "10", "12"]
    (run / "checkpoint-13" / "shard.pt").unlink()
    removed, kept = _prune(capsys, run, "--keep", "1", "--yes")
    assert removed == ["10"]
    assert {step: reason.partition(":")[0] for step, reason in kept.items()} == {
        "9": "the best",
        "12": "one of the newest 1",
        "13": "damaged",
    }


def test_prune_never_deletes_the_only_whole_one(run, capsys):
    (run / "checkpoint-10" / "shard.pt").unlink()
    removed, kept = _prune(capsys, run, "--keep", "1", "--yes")
    assert removed == []
    assert kept["9"] == "one of the newest 1"
    assert kept["10"].startswith("damaged: ")
    assert main(["checkpoint", "prune", str(run), "--keep", "0"]) == 2
    assert main(["checkpoint", "prune", str(run / "absent")]) == 2
