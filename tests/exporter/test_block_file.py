"""Files that several threads write in place, in whole blocks past the system's cache where that is possible."""

from __future__ import annotations

import errno
import os
import random
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from toolkit.exporter import block_file
from toolkit.exporter.block_file import BlockFile

HEAD = b"the first bytes"


def _write(path: Path) -> bytes:
    """Writes pieces of any length in any order, from threads; gives what the file must be."""
    draw = random.Random(3)
    content = draw.randbytes(300_000)
    cuts = sorted({0, len(content), 4096, 8192, *(draw.randrange(len(content)) for _ in range(30))})
    pieces = list(pairwise(cuts))
    draw.shuffle(pieces)
    file = BlockFile(path, HEAD, len(HEAD) + len(content))
    with ThreadPoolExecutor(4) as pool:
        done = [pool.submit(file.write_at, memoryview(content)[a:b], len(HEAD) + a) for a, b in pieces]
        for each in done:
            each.result()
    file.sync()
    file.close()
    return HEAD + content


def test_pieces_of_any_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_file, "_STAGED_BYTES", 8192)
    content = _write(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == content


@pytest.mark.parametrize("where", ["open", "write", "half"])
def test_a_file_system_without_direct_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    opened, written = os.open, os.pwrite
    direct: set[int] = set()

    def open_(path: Any, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT and where == "open":
            raise OSError(errno.EINVAL, "no direct writes")
        handle = opened(path, flags, *rest)
        if flags & os.O_DIRECT:
            direct.add(handle)
        return handle

    def pwrite(handle: int, values: memoryview, at: int) -> int:
        if handle not in direct:
            return written(handle, values, at)
        if where == "write":
            raise OSError(errno.EINVAL, "another block size")
        return written(handle, values[:4096], at)  # less than was asked for

    monkeypatch.setattr(block_file.os, "open", open_)
    monkeypatch.setattr(block_file.os, "pwrite", pwrite)
    content = _write(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == content
