"""Indexes of files of tensors, and checks of the tensors that are read of them."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from toolkit.checkpoint.archives import ReadChecks, index_digest, release
from toolkit.checkpoint.manifest import Entry, hash_files, index_problems, read_manifest, write_manifest
from toolkit.checkpoint.pickles import read_pickle


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    tensors = {"a": torch.randn(5000), "b": torch.randn(3000)}
    torch.save(tensors, tmp_path / "a.pt")
    torch.save({"a": tensors["a"], "b": tensors["b"] + 1}, tmp_path / "b.pt")
    save_file(tensors, tmp_path / "c.safetensors")
    (tmp_path / "d.pt").write_bytes(b"of another program")
    (tmp_path / "e.json").write_text("{}")
    return tmp_path


def _flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def _place_of_data(path: Path) -> int:
    with zipfile.ZipFile(path) as archive:
        largest = max(archive.infolist(), key=lambda entry: entry.file_size)
        return largest.header_offset + 2000


def _manifest(folder: Path, *names: str) -> dict[str, Entry]:
    write_manifest(folder, hash_files(folder, names))
    return read_manifest(folder)


def test_an_index_tells_files_of_one_size_apart(folder: Path) -> None:
    manifest = _manifest(folder, *(path.name for path in folder.iterdir()))
    assert [name for name, entry in manifest.items() if entry.index] == ["a.pt", "b.pt", "c.safetensors"]
    assert (folder / "a.pt").stat().st_size == (folder / "b.pt").stat().st_size
    assert index_problems(folder, manifest) == []
    (folder / "a.pt").rename(folder / "x")
    (folder / "b.pt").rename(folder / "a.pt")
    (folder / "x").rename(folder / "b.pt")
    _flip(folder / "c.safetensors", 20)
    found = index_problems(folder, manifest)
    assert [problem.message.split(" has ")[0] for problem in found] == [
        str(folder / name) for name in ("a.pt", "b.pt", "c.safetensors")
    ]


@pytest.mark.parametrize("cut", [1, 30, 5000])
def test_a_file_that_is_cut_short_has_no_index(folder: Path, cut: int) -> None:
    manifest = _manifest(folder, "a.pt")
    content = (folder / "a.pt").read_bytes()
    (folder / "a.pt").write_bytes(content[:-cut])
    assert len(index_problems(folder, manifest)) == 1


def test_each_bit_of_what_is_read_is_checked(folder: Path) -> None:
    paths = [folder / "a.pt", folder / "b.pt"]

    def agree(key: str) -> bool:
        checks = ReadChecks(paths)
        value = read_pickle(folder, "b.pt", mmap=True)[key]
        checks.see(value[:10])  # of a part, all of its record is checked
        checks.see(value[10:])
        return checks.agree()

    assert agree("a")
    assert agree("b")
    _flip(folder / "b.pt", _place_of_data(folder / "b.pt"))
    assert not agree("a")
    assert agree("b"), "what is not read is not checked"


def test_a_damaged_description_is_refused(folder: Path) -> None:
    with zipfile.ZipFile(folder / "a.pt") as archive:
        place = next(entry for entry in archive.infolist() if entry.filename.endswith("/data.pkl")).header_offset
    _flip(folder / "a.pt", place + 120)
    with pytest.raises(ValueError, match=r"a\.pt cannot be read"):
        ReadChecks([folder / "a.pt"])


def test_released_values_are_read_again(folder: Path) -> None:
    large = torch.arange(1_000_003, dtype=torch.float32)
    torch.save({"large": large}, folder / "large.pt")
    mapped = read_pickle(folder, "large.pt", mmap=True)["large"]
    assert torch.equal(mapped, large)
    release(mapped)
    release(mapped[:3])
    release(mapped[::2])
    assert torch.equal(mapped, large)


def test_no_index_without_reading_all(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes((2**40).to_bytes(8, "little") + b"x")
    with pytest.raises(ValueError, match="its index has"):
        index_digest(tmp_path, "a.safetensors")
