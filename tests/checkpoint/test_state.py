"""What a checkpoint says of its run is believed after its checksum, and only where it has the right type."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hostile_files import agree
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_plans import tiny_plan

from toolkit.checkpoint.fingerprint import Source
from toolkit.checkpoint.state import State, saved_plan
from toolkit.errors import CheckpointError

STATE = State(
    step=4,
    num_steps=None,
    zero_stage=2,
    world_size=2,
    train_batch_size=8,
    saved_at=1.7e9,
    versions={"toolkit": "0.1.0"},
    sources={"data.train": (Source(name="a.jsonl", num_bytes=3, modified_ns=-1, sha256="0" * 64),)},
)
WRONG: dict[str, Any] = {
    "step": -1,
    "num_steps": 4.5,
    "zero_stage": 4,
    "world_size": True,
    "train_batch_size": "8",
    "saved_at": 1e300,
    "versions": ["0.1.0"],
    "sources": [],
}


def _write(folder: Path, **files: str | bytes) -> Path:
    STATE.save(folder)
    for name, content in files.items():
        (folder / f"{name}.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    agree(folder)
    return folder


def _damage(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        State.load(folder)
    assert caught.value.codes == ("CHECKPOINT_DAMAGED",)
    assert caught.value.problems[0].key == str(folder)
    return str(caught.value)


def test_it_is_read_as_it_was_saved(tmp_path: Path) -> None:
    assert State.load(_write(tmp_path)) == STATE
    earlier = json.loads((tmp_path / "state.json").read_text())
    del earlier["sources"]  # as the earliest versions wrote it
    assert State.load(_write(tmp_path, state=json.dumps(earlier))).sources == {}


def test_every_bit_of_it_counts(tmp_path: Path) -> None:
    _write(tmp_path)
    path = tmp_path / "state.json"
    content = path.read_bytes()
    for place in range(0, len(content), 29):
        path.write_bytes(content[:place] + bytes([content[place] ^ 2]) + content[place + 1 :])
        assert f"{path} has another SHA-256" in _damage(tmp_path)


@pytest.mark.parametrize("key", WRONG)
def test_a_value_of_another_type_is_named(tmp_path: Path, key: str) -> None:
    state = STATE.model_dump(mode="json")
    assert f"state.json cannot be read: {key}" in _damage(_write(tmp_path, state=json.dumps(state | {key: WRONG[key]})))
    del state[key]
    if key != "sources":
        assert f"cannot be read: {key}: Field required" in _damage(_write(tmp_path, state=json.dumps(state)))


@settings(max_examples=15, deadline=None)
@given(content=st.binary(max_size=40) | st.recursive(st.none() | st.floats() | st.text(), st.lists).map(json.dumps))
def test_whatever_a_file_holds_is_one_error(tmp_path_factory: pytest.TempPathFactory, content: str | bytes) -> None:
    folder = _write(tmp_path_factory.mktemp("state"), state=content, plan=content)
    _damage(folder)
    STATE.save(folder)
    agree(folder)
    with pytest.raises(CheckpointError) as caught:
        saved_plan(folder)
    assert caught.value.codes in (("CHECKPOINT_DAMAGED",), ("CHECKPOINT_VERSION",))


def test_a_plan_of_another_version_says_which_wrote_it(tmp_path: Path) -> None:
    plan = tiny_plan()
    assert saved_plan(_write(tmp_path, plan=json.dumps(plan.to_dict()))) == plan
    later = plan.to_dict() | {"schema_version": 2}
    state = STATE.model_copy(update={"versions": {"toolkit": "9.0"}}).model_dump_json()
    with pytest.raises(CheckpointError, match="saved by version 9") as caught:
        saved_plan(_write(tmp_path, plan=json.dumps(later), state=state))
    assert caught.value.codes == ("CHECKPOINT_VERSION",)
    assert "schema_version=2, this version reads 1" in str(caught.value)
    own = STATE.model_copy(update={"versions": {}}).model_dump_json()
    with pytest.raises(CheckpointError) as caught:
        saved_plan(_write(tmp_path, plan=json.dumps(later), state=own))
    assert caught.value.codes == ("CHECKPOINT_DAMAGED",)
