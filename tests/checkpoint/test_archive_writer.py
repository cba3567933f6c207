"""Archives that several threads write are those of `torch.save`: other programs read them and find every checksum right."""

from __future__ import annotations

import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from toolkit.checkpoint import files as module
from toolkit.checkpoint.archive_writer import Record
from toolkit.checkpoint.files import Files


def _written(folder: Path, value: Any) -> Path:
    files = Files(folder)
    files.save(value, folder / "a.pt")
    files.close()
    return folder / "a.pt"


def _state() -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)
    return {
        "large": torch.randn(5_003, generator=draw),
        "small": [torch.randn(count, generator=draw).to(torch.bfloat16) for count in range(40)],
        "fp8": torch.randn(17, generator=draw).to(torch.float8_e4m3fn),
        "storage": torch.arange(5).untyped_storage(),
        "text": "of the file",
    }


@pytest.mark.parametrize("part_bytes", [1_009, 2**24])
def test_each_checksum_is_right_wherever_parts_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int
) -> None:
    """Descriptors and the directory, which are made of checksums, lie across the ends of parts."""
    monkeypatch.setattr(module, "PART_BYTES", part_bytes)
    path = _written(tmp_path, _state())
    torch.save(_state(), tmp_path / "reference.pt")
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(tmp_path / "reference.pt") as reference:
        assert archive.testzip() is None
        found, wanted = (
            {entry.filename.split("/", 1)[1]: (entry.file_size, entry.CRC) for entry in each.infolist()}
            for each in (archive, reference)
        )
        content = path.read_bytes()
        for entry in archive.infolist():
            names, extras = struct.unpack("<HH", content[entry.header_offset + 26 : entry.header_offset + 30])
            start = entry.header_offset + 30 + names + extras
            assert start % 64 == 0
            after = struct.unpack("<4sIII", content[start + entry.file_size : start + entry.file_size + 16])
            assert after == (b"PK\7\10", entry.CRC, entry.file_size, entry.file_size)
    assert found == {name: wanted[name] for name in found}
    assert wanted.keys() - found.keys() == {".format_version", ".storage_alignment", ".data/serialization_id"}
    for mmap in (False, True):
        state = torch.load(path, weights_only=True, mmap=mmap)
        assert torch.equal(state["large"], _state()["large"])
        assert all(map(torch.equal, state["small"], _state()["small"]))
        assert torch.equal(state["fp8"].view(torch.uint8), _state()["fp8"].view(torch.uint8))
        assert list(state["storage"]) == list(_state()["storage"])


def test_parts_of_a_storage_are_written_alone_and_once(tmp_path: Path) -> None:
    flat = torch.arange(100_000.0)
    state = {"a": flat[10:20], "tied": flat[10:20], "b": flat[20:40].view(4, 5), "t": flat[:6].view(2, 3).t()}
    path = _written(tmp_path, {name: state[name] for name in ("a", "tied", "b")})
    assert path.stat().st_size < 3_000
    found: dict[str, Tensor] = torch.load(path, weights_only=True)
    assert found["a"].data_ptr() == found["tied"].data_ptr()
    assert all(torch.equal(found[name], state[name]) for name in found)
    transposed = torch.load(_written(tmp_path, state), weights_only=True)["t"]
    assert torch.equal(transposed, state["t"])
    assert transposed.stride() == (1, 3)


def test_a_record_above_four_gib_is_described_in_64_bits() -> None:
    record = Record(b"archive/data/0", 2**33, 2**32 + 5)
    before, after, entry = record.header(), record.after(), record.entry(7)
    assert (record.offset + len(before)) % 64 == 0
    assert struct.unpack("<HHQQ", before[44:64]) == (1, 16, 2**32 + 5, 2**32 + 5)
    assert struct.unpack("<4sIQQ", after) == (b"PK\7\10", 0, 2**32 + 5, 2**32 + 5)
    assert record.num_bytes_after == len(after)
    assert struct.unpack("<HH3Q", entry[60:]) == (1, 24, 2**32 + 5, 2**32 + 5, 2**33)
    assert len(entry) == len(record.entry(0))


def test_the_checksum_of_pieces_is_that_of_the_whole() -> None:
    content, record, at = bytes(range(256)) * 300, Record(b"n", 0, 76_800), 0
    for size in (1, 0, 65_536, 7, 11_256):
        record.piece(size).set_result(zlib.crc32(content[at : at + size]))
        at += size
    assert record.crc() == zlib.crc32(content)
