"""A new file of known size, written in place by several threads, whole blocks past the system's cache.

A buffered write of an export allocates a page of memory for each 4 KiB of it, to hold what nobody reads, and then waits for the disk in
`fsync`. Whole blocks go to the disk directly where the file system can do that; what remains at a tensor's two ends goes
through the cache.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
from pathlib import Path

import numpy as np

# Direct writes ask for a multiple of the disk's logical block, and what is written beside them must not be of the same page: 64 KiB on some.
_BLOCK_BYTES = max(4096, mmap.PAGESIZE)
_STAGED_BYTES = 8 * 2**20


class BlockFile:
    """A file that is written in place.

    Args:
        path: Path of the file, which is made.
        head: Its first bytes.
        size: Its size, bytes.
    Raises:
        OSError: It cannot be written.
    """

    def __init__(self, path: Path, head: bytes, size: int) -> None:
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._direct: int | None = None
        self._is_direct = True
        self._staged = threading.local()
        try:
            os.ftruncate(self._handle, size)
            self._write(memoryview(head), 0)
            with contextlib.suppress(OSError, AttributeError):  # of a system or a file system without direct writes
                self._direct = os.open(path, os.O_WRONLY | os.O_DIRECT)
        except BaseException:
            self.close()
            raise

    def write_at(self, values: memoryview, start: int) -> None:
        """Write bytes at an offset, in any thread; no other may write the same."""
        stop = start + len(values)
        first, last = -(-start // _BLOCK_BYTES) * _BLOCK_BYTES, stop // _BLOCK_BYTES * _BLOCK_BYTES
        if first >= last or self._direct is None or not self._is_direct:
            self._write(values, start)
            return
        self._write(values[: first - start], start)
        done = self._write_blocks(values[first - start : last - start], first, self._direct)
        self._write(values[done - start :], done)

    def sync(self) -> None:
        """Force the file to disk."""
        os.fsync(self._handle)

    def close(self) -> None:
        """Close the file."""
        for handle in (self._handle, self._direct):
            if handle is not None:
                os.close(handle)

    def _write(self, values: memoryview, start: int) -> None:
        written = 0
        while written < len(values):  # the system writes at most 2 GiB at once
            written += os.pwrite(self._handle, values[written:], start + written)

    def _write_blocks(self, values: memoryview, start: int, direct: int) -> int:
        """Write whole blocks from memory that is aligned as they are; return the offset up to which that was possible."""
        if not hasattr(self._staged, "memory"):
            self._staged.memory = np.frombuffer(mmap.mmap(-1, _STAGED_BYTES), np.uint8)
        staged, done = self._staged.memory, 0
        while done < len(values):
            size = min(_STAGED_BYTES, len(values) - done)
            np.copyto(staged[:size], np.frombuffer(values[done : done + size], np.uint8))  # other threads run meanwhile
            try:
                written = os.pwrite(direct, staged[:size], start + done)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._is_direct = False  # it wants larger blocks
                break
            done += written
            if written % _BLOCK_BYTES:
                break
        return start + done
