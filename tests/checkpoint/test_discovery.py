"""Which checkpoints there are, which goes first, and what a crash leaves."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hostile_files import agree
from tiny_plans import tiny_plan

from toolkit.checkpoint.discovery import latest_checkpoint, list_checkpoints, recover, remove_leftovers, rotate
from toolkit.checkpoint.manifest import verify
from toolkit.checkpoint.resume import candidates, resume_point, set_aside
from toolkit.checkpoint.state import State
from toolkit.errors import CheckpointError

STATE = State(step=0, num_steps=9, zero_stage=2, world_size=1, train_batch_size=4, saved_at=0.0, versions={})


def _make(run: Path, step: int, *, saved_at: float | None = None, name: str | None = None) -> Path:
    folder = run / (name or f"checkpoint-{step}")
    folder.mkdir(parents=True)
    STATE.model_copy(update={"step": step, "saved_at": float(step) if saved_at is None else saved_at}).save(folder)
    (folder / "shard.pt").write_bytes(b"x" * 1000)
    agree(folder)
    return folder


def _names(run: Path) -> list[str]:
    return [path.name for path in list_checkpoints(run)]


def test_only_complete_checkpoints_count(tmp_path: Path) -> None:
    for step in (100, 20, 9):
        _make(tmp_path, step)
    (tmp_path / "checkpoint-200").mkdir()  # no manifest
    _make(tmp_path, 300, name="checkpoint-best")
    _make(tmp_path, 400, name=".checkpoint-400.partial")
    assert _names(tmp_path) == ["checkpoint-9", "checkpoint-20", "checkpoint-100"]
    assert latest_checkpoint(tmp_path).name == "checkpoint-100"


def test_ranks_that_recover_at_once(tmp_path: Path) -> None:
    """Each of them finds the checkpoint under its good name after its own call, and none fails."""
    for step in range(1, 31):
        _make(tmp_path, step, name=f".checkpoint-{step}.partial")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: recover(tmp_path), range(8)))
    assert _names(tmp_path) == [f"checkpoint-{step}" for step in range(1, 31)]


def test_none(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(CheckpointError) as caught:
            latest_checkpoint(folder)
        assert caught.value.codes == ("CHECKPOINT_NONE",)


def test_newest_is_saved_last(tmp_path: Path) -> None:
    for step, saved_at in ((20, 1.0), (40, 2.0), (60, 3.0), (30, 4.0)):
        _make(tmp_path, step, saved_at=saved_at)
    assert latest_checkpoint(tmp_path).name == "checkpoint-30"
    assert [path.name for path in rotate(tmp_path, keep=2)] == ["checkpoint-20", "checkpoint-40"]
    assert _names(tmp_path) == ["checkpoint-60", "checkpoint-30"]


def test_a_damaged_state_is_neither_resumed_nor_passed_over(tmp_path: Path) -> None:
    """One bit of the last checkpoint's step: what it says is not believed, and to go back further is the user's choice."""
    for step in (1, 2, 3):
        _make(tmp_path, step)
    state = tmp_path / "checkpoint-3" / "state.json"
    state.write_text(state.read_text().replace('"step": 3', '"step": 7'))
    with pytest.raises(CheckpointError, match="has another SHA-256") as caught:
        latest_checkpoint(tmp_path)
    assert caught.value.codes == ("CHECKPOINT_DAMAGED",)
    assert f"Name {tmp_path / 'checkpoint-2'} to continue from there" in str(caught.value)
    rotate(tmp_path, keep=2)
    assert _names(tmp_path) == ["checkpoint-1", "checkpoint-2"]
    (tmp_path / "checkpoint-1" / "state.json").write_text("{")
    assert latest_checkpoint(tmp_path).name == "checkpoint-2", "an earlier one is in nobody's way"
    (tmp_path / "checkpoint-2" / "state.json").unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        latest_checkpoint(tmp_path)


def test_a_later_one_that_lost_its_manifest_is_not_passed_over(tmp_path: Path) -> None:
    """Half a copy of the last one: `latest` does not go back in silence, and `auto` says so; a new start leaves it aside."""
    for step in (1, 2, 3):
        (_make(tmp_path, step) / "plan.json").write_text("{}")
    (tmp_path / "checkpoint-3" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing") as caught:
        latest_checkpoint(tmp_path)
    assert caught.value.codes == ("CHECKPOINT_DAMAGED",)
    assert f"Name {tmp_path / 'checkpoint-2'} to continue from there" in str(caught.value)
    assert [path.name for path in candidates(tmp_path, "auto")] == ["checkpoint-3", "checkpoint-2", "checkpoint-1"]
    (tmp_path / "checkpoint-1" / "manifest.json").unlink()
    set_aside(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"damaged-checkpoint-{step}" for step in (1, 2, 3)]


def test_a_later_one_of_another_program_is_not_trained_over(tmp_path: Path) -> None:
    _make(tmp_path, 2)
    (tmp_path / "checkpoint-500" / "global_step500").mkdir(parents=True)
    (tmp_path / "checkpoint-500" / "latest").write_text("global_step500")
    with pytest.raises(CheckpointError, match="another program wrote it") as caught:
        latest_checkpoint(tmp_path)
    assert "or move checkpoint-500 elsewhere" in str(caught.value)
    with pytest.raises(CheckpointError) as caught:
        resume_point(tiny_plan(train={"output_dir": str(tmp_path)}), "auto", say=print)
    assert caught.value.codes == ("CHECKPOINT_OTHER_TOOL",)
    shutil.rmtree(tmp_path / "checkpoint-2")
    with pytest.raises(CheckpointError, match=r"toolkit checkpoint adopt") as caught:
        latest_checkpoint(tmp_path)


@pytest.mark.parametrize("keep", [1, 2, 3, 9])
def test_rotation_keeps_the_newest(tmp_path: Path, keep: int) -> None:
    for step in (1, 2, 3):
        _make(tmp_path, step)
    rotate(tmp_path, keep=keep)
    assert _names(tmp_path) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"][-keep:]
    assert not list(tmp_path.glob(".*"))


def test_a_crash_while_rotating_leaves_no_half_under_a_good_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        _make(tmp_path, step)
    delete = shutil.rmtree

    def crash(path: Path, ignore_errors: bool = False) -> None:
        if path.exists():
            (path / "shard.pt").unlink()
            raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", crash)
    with pytest.raises(KeyboardInterrupt):
        rotate(tmp_path, keep=1)
    monkeypatch.setattr(shutil, "rmtree", delete)
    assert _names(tmp_path) == ["checkpoint-2"]
    verify(tmp_path / "checkpoint-2")
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2"]


def test_leftovers_go_and_nothing_else(tmp_path: Path) -> None:
    _make(tmp_path, 1)
    (tmp_path / ".checkpoint-2.partial" / "global_step2").mkdir(parents=True)
    _make(tmp_path, 0, name=".checkpoint-0.removed")
    (tmp_path / ".mine").mkdir()
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".mine", "checkpoint-1"]


def test_a_crash_between_the_last_two_renames_loses_nothing(tmp_path: Path) -> None:
    """Saving step 2 anew: the old one has been moved away, the new one is complete but has not got its name."""
    _make(tmp_path, 2, name=".checkpoint-2.removed")
    new = _make(tmp_path, 2, saved_at=9.0, name=".checkpoint-2.partial")
    (new / "shard.pt").write_bytes(b"y" * 1000)
    agree(new)
    recover(tmp_path)
    assert _names(tmp_path) == ["checkpoint-2"]
    assert (tmp_path / "checkpoint-2" / "shard.pt").read_bytes() == b"y" * 1000


def test_what_is_cut_short_is_not_recovered(tmp_path: Path) -> None:
    partial = _make(tmp_path, 2, name=".checkpoint-2.partial")
    (partial / "shard.pt").write_bytes(b"")
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_has_its_name_is_not_replaced(tmp_path: Path) -> None:
    _make(tmp_path, 2)
    _make(tmp_path, 2, name=".checkpoint-2.partial", saved_at=99.0)
    remove_leftovers(tmp_path)
    assert State.load(tmp_path / "checkpoint-2").saved_at == 2.0
