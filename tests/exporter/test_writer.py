import json
import resource
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from quick_python import quick_python
from safetensors import safe_open
from safetensors.torch import load_file

from toolkit.errors import CheckpointError, RunError
from toolkit.exporter.writer import Entry, ShardWriter, staged_folder


def _entry(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Entry:
    return Entry(name=name, shape=shape, dtype=dtype)


def _values(entry: Entry) -> torch.Tensor:
    values = torch.randint(0, 2, entry.shape, generator=torch.Generator().manual_seed(len(entry.name)))
    return values.to(entry.dtype)


MIXED = [
    _entry("flag", 3, dtype=torch.bool),
    _entry("half", 5, dtype=torch.bfloat16),
    _entry("scalar"),
    _entry("empty", 0, 4),
    _entry("count", 1, dtype=torch.int64),
    _entry("full", 4, 3),
    _entry("byte", 7, dtype=torch.uint8),
]


@pytest.mark.parametrize("limit", [8, 40, 10**6])
def test_any_order_and_any_dtype_reads_back(tmp_path: Path, limit: int) -> None:
    with ShardWriter(tmp_path, MIXED, limit) as writer:
        for entry in reversed(MIXED):
            writer.write(entry.name, _values(entry))
    found: dict[str, torch.Tensor] = {}
    for file in tmp_path.glob("*.safetensors"):
        found |= load_file(file)
        with safe_open(file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
    assert found.keys() == {entry.name for entry in MIXED} == writer.digests.keys()
    for entry in MIXED:
        assert found[entry.name].dtype is entry.dtype
        assert torch.equal(found[entry.name], _values(entry))
    index = tmp_path / "model.safetensors.index.json"
    assert index.is_file() == (limit < 10**6)
    if index.is_file():
        content = json.loads(index.read_text())
        assert content["weight_map"] == writer.file_of
        assert content["metadata"] == {
            "total_size": 3 + 10 + 4 + 0 + 8 + 48 + 7,
            "total_parameters": 3 + 5 + 1 + 0 + 1 + 12 + 7,
        }


@pytest.mark.parametrize("limit", [1, 80, 1000])
def test_the_files_are_those_that_the_hub_writes(tmp_path: Path, limit: int) -> None:
    entries = [_entry(name, 10) for name in "abc"] + [_entry("large", 100), _entry("d", 1)]
    ours, hubs = tmp_path / "ours", tmp_path / "hubs"
    ours.mkdir()
    hubs.mkdir()
    with ShardWriter(ours, entries, limit) as writer:
        for entry in reversed(entries):
            writer.write(entry.name, _values(entry))
    save_torch_state_dict({entry.name: _values(entry) for entry in entries}, hubs, max_shard_size=limit)
    assert {path.name for path in ours.iterdir()} == {path.name for path in hubs.iterdir()}
    assert len(list(ours.glob("*.safetensors"))) == {1: 5, 80: 3, 1000: 1}[limit]
    for path in ours.glob("*.safetensors"):
        mine, theirs = load_file(path), load_file(hubs / path.name)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_what_differs_from_the_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="was planned as"), ShardWriter(tmp_path, [_entry("a", 2)], 100) as writer:
        writer.write("a", torch.zeros(3))
    with pytest.raises(ValueError, match="never given, first a"), ShardWriter(tmp_path, [_entry("a", 2)], 100):
        pass


def test_a_folder_that_cannot_be_made_is_a_run_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError) as caught, staged_folder(tmp_path / "file" / "out", overwrite=False):
        pass
    assert caught.value.codes == ("EXPORT_WRITE",)


def test_a_failure_keeps_the_old_folder(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "old").write_text("")
    with pytest.raises(FileNotFoundError), staged_folder(target, overwrite=True) as staged:
        (staged / "lost").unlink()
    assert [path.name for path in target.iterdir()] == ["old"]
    with staged_folder(target, overwrite=True) as staged:
        (staged / "new").write_text("")
    assert [path.name for path in target.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with pytest.raises(CheckpointError), staged_folder(target, overwrite=False):
        pass
    link = tmp_path / "link"
    link.symlink_to(target)
    with staged_folder(link, overwrite=True):
        pass
    assert (link.is_symlink(), {path.name for path in tmp_path.iterdir()}) == (False, {"out", "link"})
    assert (target / "new").exists()


def test_a_file_is_never_replaced(tmp_path: Path) -> None:
    file = tmp_path / "export"
    file.write_text("notes")
    with pytest.raises(CheckpointError, match="move that file") as caught, staged_folder(file, overwrite=True):
        pass
    assert (caught.value.codes, file.read_text()) == (("EXPORT_EXISTS",), "notes")


def test_what_killed_exports_left_is_removed(tmp_path):
    target = tmp_path / "out[1]"
    kill = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    script = (
        "import sys; from pathlib import Path; from toolkit.exporter.writer import staged_folder\n"
        f"with staged_folder(Path(sys.argv[1]), overwrite=False) as staged:\n    (staged / 'part').touch(); {kill}"
    )
    assert subprocess.run([quick_python(), "-c", script, str(target)], check=False).returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    with staged_folder(target, overwrite=False) as own:
        assert not left.exists()
        with staged_folder(tmp_path / "other", overwrite=False):
            assert own.exists(), "of a process that lives"
    assert {path.name for path in tmp_path.iterdir()} == {"out[1]", "other"}
    # One that was killed between its last two renames: what it was about to replace comes back, and is kept unless told otherwise.
    (target / "old").touch()
    target.rename(tmp_path / left.name.replace(".partial-", ".replaced-"))
    with pytest.raises(CheckpointError), staged_folder(target, overwrite=False):
        pass
    assert [path.name for path in target.iterdir()] == ["old"]
    shutil.copytree(target, tmp_path / left.name.replace(".partial-", ".replaced-"))
    with staged_folder(target, overwrite=True) as own:
        (own / "new").touch()
    assert [path.name for path in target.iterdir()] == ["new"]
    assert {path.name for path in tmp_path.iterdir()} == {"out[1]", "other"}


def test_a_limit_of_file_sizes_names_itself(tmp_path: Path) -> None:
    """`ulimit -f`: more space on the disk would not help."""
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (102_400, former[1]))
    try:
        with pytest.raises(RunError) as caught, ShardWriter(tmp_path, [_entry("a", 10**6)], 10**9):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
    assert caught.value.codes == ("EXPORT_WRITE",)
    assert "model.safetensors cannot be written: no file may be larger than 100.00 KiB here" in str(caught.value)
    assert "or export with a smaller --max-shard-size, then export again" in str(caught.value)
