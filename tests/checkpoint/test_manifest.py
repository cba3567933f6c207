"""What a manifest catches, and what is said of folders that have none."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from toolkit.checkpoint import manifest as module
from toolkit.checkpoint.manifest import hash_files, list_files, read_manifest, read_small, share, verify, write_manifest
from toolkit.errors import CheckpointError

SHARD = "global_step4/zero_optim_states.pt"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint-4"
    (folder / "global_step4").mkdir(parents=True)
    (folder / "random").mkdir()
    (folder / "state.json").write_text("{}")
    (folder / SHARD).write_bytes(bytes(range(256)) * 64)
    (folder / "random" / "rank-00000.pt").write_bytes(b"")
    write_manifest(folder, hash_files(folder, list_files(folder), sync=True))
    return folder


def _codes(folder: Path) -> tuple[tuple[str, ...], str]:
    with pytest.raises(CheckpointError) as caught:
        verify(folder)
    return caught.value.codes, str(caught.value)


def test_a_whole_checkpoint_verifies(folder: Path) -> None:
    assert sorted(verify(folder)) == [SHARD, "random/rank-00000.pt", "state.json"]
    assert verify(folder)[SHARD].num_bytes == 256 * 64


def test_a_missing_file(folder: Path) -> None:
    (folder / "random" / "rank-00000.pt").unlink()
    codes, text = _codes(folder)
    assert codes == ("CHECKPOINT_DAMAGED",)
    assert "rank-00000.pt is missing" in text


def test_a_file_cut_short(folder: Path) -> None:
    (folder / SHARD).write_bytes((folder / SHARD).read_bytes()[:-1])
    assert "has 16383 bytes, the manifest says 16384" in _codes(folder)[1]


@pytest.mark.parametrize("position", [0, 8191, 16383])
def test_a_flipped_bit(folder: Path, position: int) -> None:
    content = bytearray((folder / SHARD).read_bytes())
    content[position] ^= 1
    (folder / SHARD).write_bytes(content)
    codes, text = _codes(folder)
    assert codes == ("CHECKPOINT_DAMAGED",)
    assert f"{folder / SHARD} has another SHA-256" in text
    verify(folder, unread=lambda name: name == SHARD)


def test_every_damage_is_named(folder: Path) -> None:
    (folder / "random" / "rank-00000.pt").unlink()
    (folder / "state.json").write_text("{} ")
    assert _codes(folder)[0] == ("CHECKPOINT_DAMAGED",) * 2


def _naming(name: str, num_bytes: object = 0) -> str:
    return json.dumps({"format": 1, "files": {name: {"bytes": num_bytes, "sha256": hashlib.sha256(b"").hexdigest()}}})


NO_MANIFEST: dict[str, str | bytes] = {
    "empty": "",
    "list": "[]",
    "number": '{"format": 1, "files": {"a": 3}}',
    "text for bytes": _naming("a", "0"),
    "negative": _naming("a", -1),
    "infinity": _naming("a", float("inf")),
    "1e300": _naming("a", 1e300),
    "digest": _naming("a").replace("e3b0", "E3B0"),
    "later format": _naming("a").replace("1,", "3,"),
    "not UTF-8": b'{"format": 1, "files": {"\xff": {}}}',
    "UTF-16": _naming("a").encode("utf-16"),
    "nested": "[" * 10_000,
    "nested in files": '{"format": 1, "files": ' + '{"a":' * 10_000,
    "NUL": _naming("a\0b"),
    "lone surrogate": _naming("\ud800"),
    "device": _naming("/dev/zero"),
    "absolute": _naming("/etc/hostname"),
    "above": _naming("random/../../checkpoint-4/state.json"),
    "here": _naming("./state.json"),
    "nothing": _naming(""),
}


@pytest.mark.parametrize("name", NO_MANIFEST)
def test_a_manifest_that_is_none(folder: Path, name: str) -> None:
    text = NO_MANIFEST[name]
    (folder / "manifest.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    codes, message = _codes(folder)
    assert codes == ("CHECKPOINT_DAMAGED",)
    assert message.startswith(f"{folder / 'manifest.json'} cannot be read: ")


def test_only_plain_files_inside_the_folder_are_read(folder: Path) -> None:
    """A pipe would be waited on and a device read without end; a link leads to what is not of the checkpoint."""
    outside = folder.parent / "outside"
    outside.write_bytes(b"")
    inside = folder / "random" / "rank-00000.pt"
    for make, what in (
        (lambda: os.mkfifo(inside), "is a pipe, not a regular file"),
        (lambda: inside.symlink_to("/dev/zero"), "points outside the folder"),
        (lambda: inside.symlink_to(outside), "points outside the folder"),
        (inside.mkdir, "is a folder, not a regular file"),
    ):
        inside.rmdir() if inside.is_dir() else inside.unlink()
        make()
        codes, message = _codes(folder)
        assert (codes, f"{inside} {what}" in message) == (("CHECKPOINT_DAMAGED",), True), message
    inside.rmdir()
    inside.write_bytes(b"")
    verify(folder)
    (folder / "manifest.json").rename(folder / "kept")
    os.mkfifo(folder / "manifest.json")
    assert "manifest.json cannot be read: is a pipe" in _codes(folder)[1]


def test_a_file_that_the_manifest_does_not_name(folder: Path) -> None:
    """DeepSpeed takes the model's files by their place among those it finds, transformers looks through `model`, and a
    rank reads its random states by its number."""
    for name in ("global_step4/mp_rank_00_model_states.pt", "model/config.json", "random/rank-00001.pt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"")
        assert f"{folder / name} is not in manifest.json" in _codes(folder)[1]
        (folder / name).unlink()
    (folder / "notes.txt").write_text("mine")
    (folder / "model" / ".DS_Store").write_bytes(b"")
    verify(folder)


def test_ranks_share_all_files() -> None:
    names = [f"file-{number}" for number in range(7)]
    parts = [share(names, rank=rank, world_size=3) for rank in range(3)]
    assert sorted(name for part in parts for name in part) == names


def test_files_are_hashed_side_by_side(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two files meet at a barrier that one thread alone would never pass."""
    monkeypatch.setattr(module.os, "cpu_count", lambda: 8)
    barrier, read = threading.Barrier(2, timeout=20), module._digest

    def meet(*part: Any) -> Any:
        barrier.wait()
        return read(*part)

    monkeypatch.setattr(module, "_digest", meet)
    hashed = hash_files(folder, (SHARD, "state.json"))
    assert hashed == {name: entry for name, entry in read_manifest(folder).items() if name in hashed}
    assert list(hashed) == [SHARD, "state.json"]


def test_large_files_are_hashed_by_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part by a thread of its own; a part is checked as it was written, whatever size this version takes."""
    content = bytes(range(256)) * 2**13 + b"end"  # 2 MiB and a bit
    digests = [hashlib.sha256(content[at : at + 2**20]).digest() for at in range(0, len(content), 2**20)]
    monkeypatch.setattr(module, "PART_BYTES", 2**20)
    (tmp_path / "large").write_bytes(content)
    (tmp_path / "small").write_bytes(content[: 2**20])
    found = hash_files(tmp_path, ["large", "small"])
    entry = found["large"]
    assert (entry.num_bytes, entry.part_bytes) == (2**21 + 3, 2**20)
    assert entry.sha256 == hashlib.sha256(b"".join(digests)).hexdigest()
    assert (found["small"].sha256, found["small"].part_bytes) == (digests[0].hex(), None)
    write_manifest(tmp_path, found)
    assert json.loads((tmp_path / "manifest.json").read_text())["format"] == 2
    monkeypatch.undo()
    assert verify(tmp_path) == found
    assert read_small(tmp_path, "large") == content
    for at in (0, 2**20, 2**21 + 2):
        changed = bytearray(content)
        changed[at] ^= 1
        (tmp_path / "large").write_bytes(changed)
        assert "large has another SHA-256" in _codes(tmp_path)[1]
        with pytest.raises(CheckpointError, match="large has another SHA-256"):
            read_small(tmp_path, "large")


def test_folders_without_a_manifest(tmp_path: Path) -> None:
    """Each is told what it is and what can be done with it."""
    run = tmp_path / "run"
    absent = run / "checkpoint-9"
    assert _codes(absent)[0] == ("CHECKPOINT_NOT_FOUND",)
    assert "Check the path" in _codes(absent)[1]
    complete = run / "checkpoint-4"
    complete.mkdir(parents=True)
    write_manifest(complete, {})
    assert "Its folder has checkpoint-4" in _codes(absent)[1]
    codes, text = _codes(run)
    assert codes == ("CHECKPOINT_NOT_FOUND",)
    assert f"Name one of {complete}" in text

    partial = run / ".checkpoint-8.partial"
    (partial / "global_step8").mkdir(parents=True)
    (partial / "latest").write_text("global_step8")
    (partial / "global_step8" / "shard.pt").write_bytes(b"x" * 2048)
    codes, text = _codes(partial)
    assert codes == ("CHECKPOINT_INCOMPLETE",)
    assert "2.0" in text

    (run / "checkpoint-5").mkdir()
    assert _codes(run / "checkpoint-5")[0] == ("CHECKPOINT_INCOMPLETE",)


def test_weights_only(tmp_path: Path) -> None:
    """From a public report: a folder of safetensors was given to resume from."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    codes, text = _codes(tmp_path)
    assert codes == ("CHECKPOINT_WEIGHTS_ONLY",)
    assert f"set model: {tmp_path} in the job" in text


def test_weights_of_an_adapter_and_pickled_ones(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    codes, text = _codes(tmp_path)
    assert codes == ("CHECKPOINT_WEIGHTS_ONLY",)
    assert f"set train.lora.adapter: {tmp_path} in the job" in text
    other = tmp_path / "pickled"
    other.mkdir()
    (other / "pytorch_model-00001-of-00002.bin").write_bytes(b"")
    codes, text = _codes(other)
    assert codes == ("CHECKPOINT_WEIGHTS_ONLY",)
    assert "save them as safetensors (`save_pretrained`), set model: " in text


@pytest.mark.parametrize(
    ("names", "adoptable"),
    [
        (("latest", "global_step4/mp_rank_00_model_states.pt"), True),
        (("latest_universal", "global_step4_universal/zero/a/fp32.pt"), True),
        (("pytorch_model_fsdp_0/.metadata", "optimizer_0/.metadata"), True),
        (("optimizer.pt", "scheduler.pt"), False),
    ],
)
def test_what_another_program_saved_is_more_than_its_weights(
    tmp_path: Path, names: tuple[str, ...], adoptable: bool
) -> None:
    """Trainer writes the weights beside the states of the optimizer: to go on with those is not called a warm start."""
    for name in ("model.safetensors", "config.json", "trainer_state.json", *names):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    codes, text = _codes(tmp_path)
    assert codes == ("CHECKPOINT_OTHER_TOOL",)
    assert (f"toolkit checkpoint adopt {tmp_path} OUT" in text) is adoptable
    assert ("For a warm start, set model to its weights" in text) is not adoptable


def test_a_manifest_that_is_lost(folder: Path) -> None:
    (folder / "plan.json").write_text("{}")
    (folder / "latest").write_text("global_step4")
    (folder / "manifest.json").unlink()
    codes, text = _codes(folder)
    assert codes == ("CHECKPOINT_DAMAGED",)
    assert f"{folder / 'manifest.json'} is missing" in text


def test_latest_missing(tmp_path: Path) -> None:
    """From a public report: without `latest` DeepSpeed loads nothing and trains from scratch."""
    for tag in ("global_step2", "global_step4"):
        (tmp_path / tag).mkdir()
    codes, text = _codes(tmp_path)
    assert codes == ("CHECKPOINT_NO_LATEST",)
    assert "Its tags are global_step2, global_step4" in text
    (tmp_path / "latest").write_text("global_step4")
    assert _codes(tmp_path)[0] == ("CHECKPOINT_OTHER_TOOL",)
