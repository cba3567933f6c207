"""The files of an engine's state: hashed while they are written, by several threads, at once or behind the training."""

from __future__ import annotations

import hashlib
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, cast, final

import torch
from torch import Tensor

from toolkit.checkpoint.host_copy import HostCopy
from toolkit.checkpoint.manifest import PART_BYTES, Entry
from toolkit.modeling.safetensors_folder import DTYPES

# As many as hash what a local NVMe writes (manifest.py); no fewer than two, so that one hashes while another writes.
_MAX_THREADS, _MIN_THREADS = 4, 2
# What is forced to disk at once while a file grows, so that the disk does not wait for its end.
_SYNC_BYTES = 256 * 2**20
_NICE = 10  # of threads behind the training, whose own come first
_CODES = {dtype: code for code, dtype in DTYPES.items()}


@final
class Files:
    """Writer of the files of one rank's engine into a partial checkpoint.

    Args:
        folder: Partial checkpoint.
        copy: Memory into which the state is copied, to be written after `start`; None writes it at once.

    Attributes:
        entries: Entries of the files that are complete.
        ended_at: When all was written after `start`, by `time.perf_counter`; None before.
    """

    def __init__(self, folder: Path, *, copy: HostCopy | None = None) -> None:
        self.entries: dict[str, Entry] = {}
        self.ended_at: float | None = None
        self._folder, self._copy = folder, copy
        self._waiting: list[Callable[[], None]] = []
        self._work: Future[None] | None = None
        count = max(_MIN_THREADS, min(_MAX_THREADS, os.cpu_count() or 1))
        self._pool = ThreadPoolExecutor(count, initializer=None if copy is None else _give_way)
        self._buffers: queue.SimpleQueue[bytearray] = queue.SimpleQueue()
        for _ in range(count + 1):
            self._buffers.put(bytearray(PART_BYTES))

    def save(self, state_dict: Any, path: str | Path) -> None:
        """Write what `torch.save` would write; the signature is that of DeepSpeed's checkpoint engines."""
        self._take(Path(path), state_dict, lambda value, file: torch.save(value, cast("IO[bytes]", file)))

    def save_tensors(self, path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        """Write a safetensors file."""
        self._take(path, dict(tensors), lambda value, file: _write_tensors(value, metadata, file))

    def _take(self, path: Path, value: Any, write: Callable[[Any, HashedFile], None]) -> None:
        if self._copy is None:
            self._write(path, lambda file: write(value, file))
            return
        restore = self._copy.take(value)
        self._waiting.append(lambda: self._write(path, lambda file: write(restore(), file)))

    def _write(self, path: Path, write: Callable[[HashedFile], None]) -> None:
        with path.open("wb", buffering=0) as raw:
            file = HashedFile(raw.fileno(), self._pool, self._buffers)
            try:
                write(file)
            except Exception:
                file.raise_failure()  # what a library makes of a failed write says less
                raise
            self.entries[path.relative_to(self._folder).as_posix()] = file.finish()

    def start(self) -> None:
        """Begin to write what was copied."""
        assert self._copy is not None, "without a copy it is written"
        self._copy.finish()
        self._work = Future()
        threading.Thread(target=self._write_all, args=(self._work,), name="checkpoint", daemon=True).start()

    def _write_all(self, done: Future[None]) -> None:
        try:
            _give_way()
            for write in self._waiting:
                write()
        except BaseException as error:
            done.set_exception(error)
        else:
            self.ended_at = time.perf_counter()
            done.set_result(None)

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to be written, or it has failed."""
        return self._work is None or self._work.done()

    def close(self) -> None:
        """Wait until all is written; raise what prevented it."""
        try:
            if self._work is not None:
                self._work.result()
        finally:
            self._waiting.clear()
            self._pool.shutdown()


@final
class HashedFile:
    """A file that is written from its beginning to its end, each part hashed and written by a thread of a pool.

    After a failed write it takes what comes and drops it: the libraries that write would hide the reason. `finish` raises it.

    Args:
        number: Number of a new file that is open for writing.
        pool: Threads that hash and write.
        buffers: Free memory of `PART_BYTES` each, for parts that come in pieces; one more than the pool has threads.
    """

    def __init__(self, number: int, pool: ThreadPoolExecutor, buffers: queue.SimpleQueue[bytearray]) -> None:
        self._number, self._pool, self._buffers = number, pool, buffers
        self._parts: list[Future[bytes]] = []
        self._buffer: bytearray | None = None
        self._filled = 0
        self._num_bytes = 0
        self._failure: BaseException | None = None

    def write(self, data: Any) -> int:
        """Write bytes, whose memory may be changed afterwards."""
        view = memoryview(data).cast("B")
        at, size, lent = 0, view.nbytes, []
        while at < size and self._failure is None:
            if self._buffer is None and size - at >= PART_BYTES:
                lent.append(self._submit(view[at : at + PART_BYTES]))
                at += PART_BYTES
                continue
            self._buffer = self._buffers.get() if self._buffer is None else self._buffer
            count = min(PART_BYTES - self._filled, size - at)
            self._buffer[self._filled : self._filled + count] = view[at : at + count]
            self._filled += count
            at += count
            if self._filled == PART_BYTES:
                self._end_part()
        for part in lent:
            part.exception()
        return size

    def flush(self) -> None:
        """Do nothing: `finish` forces all to disk."""

    def _end_part(self) -> None:
        buffer, count = self._buffer, self._filled
        self._buffer, self._filled = None, 0
        assert buffer is not None, "it was filled"
        self._submit(memoryview(buffer)[:count]).add_done_callback(lambda _: self._buffers.put(buffer))

    def _submit(self, part: memoryview) -> Future[bytes]:
        self._parts.append(self._pool.submit(self._store, part, self._num_bytes))
        self._num_bytes += part.nbytes
        return self._parts[-1]

    def _store(self, part: memoryview, at: int) -> bytes:
        digest = hashlib.sha256(part).digest()
        try:
            written = 0
            while written < part.nbytes and self._failure is None:
                written += os.pwrite(self._number, part[written:], at + written)
            if (at + part.nbytes) % _SYNC_BYTES == 0:
                os.fdatasync(self._number)
        except OSError as error:
            self._failure = self._failure or error
        return digest

    def raise_failure(self) -> None:
        """Raise the error of the first write that failed, if one did."""
        for part in self._parts:
            part.exception()
        if self._failure is not None:
            raise self._failure

    def finish(self) -> Entry:
        """Write what is left, force the file to disk and return its entry."""
        if self._filled:
            self._end_part()
        self.raise_failure()
        os.fsync(self._number)
        return Entry.of_parts(
            [part.result() for part in self._parts] or [hashlib.sha256().digest()], num_bytes=self._num_bytes
        )


def _write_tensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], file: HashedFile) -> None:
    """Write the format of safetensors, widest first: each tensor begins at a multiple of its item size."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    ordered = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    end = 0
    for name in ordered:
        tensor, begin = tensors[name], end
        end += tensor.numel() * tensor.itemsize
        header[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in ordered:
        file.write(tensors[name].detach().cpu().contiguous().flatten().view(torch.uint8).numpy())


def _give_way() -> None:
    """Let other threads of the machine go first (man 2 setpriority: on Linux a thread has a priority of its own)."""
    if os.name == "posix":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
