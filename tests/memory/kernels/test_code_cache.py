"""A cache of texts: what is damaged counts as absent and is written again."""

from __future__ import annotations

import os

import pytest

from toolkit.memory.kernels import code_cache
from toolkit.memory.kernels.code_cache import TextCache


def test_a_text_is_found_again(tmp_path):
    cache = TextCache(tmp_path / "new" / "folder")
    assert cache.get("key") is None
    cache.put("key", "a text\n")
    assert cache.get("key") == "a text\n"
    assert cache.get("another key") is None
    assert [path.suffix for path in cache.folder.iterdir()] == [".json"]


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"[]", b"\xff", b'{"text": "another", "sha256": "0"}', b'{"sha256": "0"}']
)
def test_a_damaged_entry_counts_as_absent_and_is_written_again(tmp_path, damage):
    cache = TextCache(tmp_path)
    cache.put("key", "a text")
    [path] = tmp_path.iterdir()
    path.write_bytes(damage)
    assert cache.get("key") is None
    cache.put("key", "a text")
    assert cache.get("key") == "a text"


def test_a_folder_that_cannot_be_made_keeps_nothing(tmp_path):
    (tmp_path / "file").touch()
    for cache in (TextCache(None), TextCache(tmp_path / "file" / "folder")):
        cache.put("key", "a text")
        assert cache.get("key") is None


def test_the_oldest_entries_go(tmp_path, monkeypatch):
    monkeypatch.setattr(code_cache, "MAX_ENTRIES", 2)
    cache = TextCache(tmp_path)
    for age, key in enumerate(["old", "middle", "new"]):
        cache.put(key, key)
        for path in tmp_path.iterdir():
            if path.stat().st_mtime > 1e6:
                os.utime(path, (age, age))
    assert [cache.get(key) for key in ("old", "middle", "new")] == [None, "middle", "new"]
