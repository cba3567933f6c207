"""The cache of records: kept while wanted and sound, removed when old or damaged."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from toolkit.artifacts.record_cache import RecordCache
from toolkit.artifacts.records import Records

NUMBERS = Records[tuple[int, ...]](tuple[int, ...])
WORDS = Records[tuple[str, ...]](tuple[str, ...])


def test_a_record_is_read_by_its_key_and_schema(tmp_path: Path) -> None:
    cache = RecordCache(tmp_path / "a" / "b")
    assert cache.get("key", NUMBERS) is None
    assert not (tmp_path / "a").exists(), "reading makes no folder"
    cache.put("key", (1, 2), NUMBERS)
    assert cache.get("key", NUMBERS) == (1, 2)
    assert cache.get("other", NUMBERS) is None
    assert cache.get("key", WORDS) is None
    assert cache.folder.stat().st_mode & 0o777 == 0o700
    assert RecordCache(cache.folder).get("key", NUMBERS) == (1, 2)


@pytest.mark.parametrize("damage", [b"", b"x", b"cut", b"flipped", b"\xff\xfe\x00"])
def test_a_damaged_record_is_absent_and_removed(tmp_path: Path, damage: bytes) -> None:
    cache = RecordCache(tmp_path)
    cache.put("key", tuple(range(1000)), NUMBERS)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes({b"cut": whole[:-9], b"flipped": whole.replace(b"999", b"998")}.get(damage, damage))
    assert cache.get("key", NUMBERS) is None
    assert not path.exists()
    cache.put("key", (1,), NUMBERS)
    assert cache.get("key", NUMBERS) == (1,)


def test_the_least_recently_used_are_removed(tmp_path: Path) -> None:
    cache = RecordCache(tmp_path, max_bytes=3 * 1200)
    for number, name in enumerate("abc"):
        cache.put(name, tuple(range(270)), NUMBERS)
        (new,) = [path for path in tmp_path.iterdir() if path.stat().st_mtime > 100]
        os.utime(new, (number + 1, number + 1))
    assert cache.get("a", NUMBERS) is not None, "used now"
    cache.put("d", tuple(range(270)), NUMBERS)
    assert [name for name in "abcd" if cache.get(name, NUMBERS) is not None] == ["a", "c", "d"]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= cache.max_bytes


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = RecordCache(tmp_path / "file" / "folder")
    cache.put("key", (1,), NUMBERS)
    assert cache.get("key", NUMBERS) is None


def test_writers_at_once_leave_one_whole_record(tmp_path: Path) -> None:
    cache = RecordCache(tmp_path)
    writers = [threading.Thread(target=cache.put, args=("key", (n,) * 500, NUMBERS)) for n in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    found = cache.get("key", NUMBERS)
    assert found is not None
    assert len(set(found)) == 1
    assert len(list(tmp_path.iterdir())) == 1
