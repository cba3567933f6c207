"""Files of tensors: their indexes, which tell a whole file from another in milliseconds, and checks of the tensors that are read of them.

`torch.save` writes an archive whose index, at its end, has the size and CRC-32 of each tensor. With the SHA-256 of the index in the
manifest, a reader of some tensors, of a file that is six times as large, checks what it reads and nothing else.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import sys
import threading
import zipfile
import zlib
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.io import MAX_TEXT_BYTES, open_plain

if TYPE_CHECKING:
    from torch import Tensor

_CHUNK_BYTES = 16 * 2**20
_MADV_DONTNEED = 4  # Linux, include/uapi/asm-generic/mman-common.h


def index_digest(folder: Path, name: str) -> str | None:
    """Return the SHA-256 of a file's index: the end of an archive of `torch.save`, the header of safetensors; None for other files.

    Raises:
        OSError: The file cannot be read.
        ValueError: Its name says that it has an index, and it has none.
    """
    if not name.endswith((".pt", ".safetensors")):
        return None
    with open_plain(folder, name) as file:
        if name.endswith(".safetensors"):
            length = int.from_bytes(file.read(8), "little")
            file.seek(0)
        elif file.read(2) != b"PK":
            return None  # another program's
        else:
            try:
                with zipfile.ZipFile(file) as archive:
                    length = os.fstat(file.fileno()).st_size - archive.start_dir
            except (zipfile.BadZipFile, NotImplementedError) as error:
                raise ValueError(f"it is no archive: {error}") from None
            file.seek(-length, os.SEEK_END)
        if length > MAX_TEXT_BYTES:
            raise ValueError(f"its index has {length} bytes")
        return hashlib.sha256(file.read(length + 8)).hexdigest()


class ReadChecks:
    """Compares every tensor that is read of some archives with the CRC-32 in their indexes, in threads beside the reading.

    A tensor's file is not known when it is read, so it must be one of all that they have.

    Args:
        paths: Archives that `torch.save` wrote, whose indexes are right.

    Raises:
        ValueError: The description of the tensors, beside them in an archive, is damaged.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._known: set[tuple[int, int]] = set()
        self._seen: set[tuple[int, int]] = set()
        self._found: list[Future[bool]] = []
        self._lock = threading.Lock()
        for path in paths:
            try:
                with zipfile.ZipFile(path) as archive:
                    entries = archive.infolist()
                    for entry in entries:
                        if entry.filename.endswith("/data.pkl"):
                            archive.read(entry)  # compares its CRC-32
            except (zipfile.BadZipFile, NotImplementedError, OSError, EOFError) as error:
                raise ValueError(f"{path} cannot be read: {error}") from None
            self._known |= {(entry.file_size, entry.CRC) for entry in entries}
        self._pool = ThreadPoolExecutor(min(4, os.cpu_count() or 1))

    def see(self, tensor: Tensor) -> None:
        """Check all that the archive has under a mapped tensor's record, unless that is done or under way."""
        storage = tensor.untyped_storage()
        place = (storage.data_ptr(), storage.nbytes())
        with self._lock:
            if place not in self._seen and storage.nbytes():
                self._seen.add(place)
                self._found.append(self._pool.submit(self._agrees, tensor))

    def agree(self) -> bool:
        """Wait for all checks, and return whether each tensor is as it was written."""
        with self._pool:
            return all(found.result() for found in self._found)

    def _agrees(self, tensor: Tensor) -> bool:
        import torch

        record = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        crc = 0
        for start in range(0, record.numel(), _CHUNK_BYTES):
            chunk = record[start : start + _CHUNK_BYTES]
            values: Any = chunk.numpy()
            crc = zlib.crc32(values, crc)
            release(chunk)
        return (record.numel(), crc) in self._known


def release(mapped: Tensor) -> None:
    """Let the system take back the pages of a mapped tensor that was read; what is read again comes from the file.

    The tensor must be part of a file's private mapping and never written to: other memory would lose its values.
    """
    if _madvise is None or not mapped.is_contiguous():
        return
    start, size = mapped.data_ptr(), mapped.numel() * mapped.element_size()
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, (start + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if first < last:
        _madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_DONTNEED)


_madvise: Any = ctypes.CDLL(None).madvise if sys.platform == "linux" else None
