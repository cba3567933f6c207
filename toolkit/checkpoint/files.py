"""The files of an engine's state: hashed while they are written, by several threads, at once or behind the training."""

from __future__ import annotations

import hashlib
import json
import os
import queue
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from toolkit.checkpoint.archive_writer import Record, write_archive
from toolkit.checkpoint.host_copy import HostCopy
from toolkit.checkpoint.manifest import Entry
from toolkit.forks import num_cores
from toolkit.modeling.safetensors_folder import DTYPES
from toolkit.planning.checkpoint_size import MOST_SAVE_THREADS, PART_BYTES

_MIN_THREADS = 2  # so that one hashes while another writes
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
        num_ranks: Ranks that write at once on this machine, which share its processors.

    Attributes:
        entries: Entries of the files that are complete.
        ended_at: When all was written after `start`, by `time.perf_counter`; None before.
    """

    def __init__(self, folder: Path, *, copy: HostCopy | None = None, num_ranks: int = 1) -> None:
        self.entries: dict[str, Entry] = {}
        self.ended_at: float | None = None
        self._folder, self._copy = folder, copy
        self._waiting: list[Callable[[], None]] = []
        self._work: Future[None] | None = None
        self._forced: list[Future[None]] = []
        count = max(_MIN_THREADS, min(MOST_SAVE_THREADS, num_cores() // num_ranks))
        self._pool = ThreadPoolExecutor(count, initializer=None if copy is None else _give_way)
        self._buffers: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        pinned = copy is None and torch.cuda.is_available()  # torch keeps the memory for the next save
        for _ in range(count + 1):
            self._buffers.put(torch.empty(PART_BYTES, dtype=torch.uint8, pin_memory=pinned))

    def save(self, state_dict: Any, path: str | Path) -> None:
        """Write what `torch.save` would write; the signature is that of DeepSpeed's checkpoint engines."""
        self._take(Path(path), state_dict, write_archive)

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
                entry = file.finish()
            finally:
                file.wait()
            self._forced.append(self._pool.submit(_force, os.dup(raw.fileno())))
        self.entries[path.relative_to(self._folder).as_posix()] = entry

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
            self._force_all()
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
            if self._work is None:
                self._force_all()
            else:
                self._work.result()
        finally:
            self._waiting.clear()
            self._pool.shutdown()

    def _force_all(self) -> None:
        """Wait until each file is on the disk: one is forced there while the next is written."""
        for forced in self._forced:
            forced.result()


@final
class HashedFile:
    """A file that is written from its beginning to its end, each part hashed and written by a thread of a pool.

    After a failed write it takes what comes and drops it; `finish` raises the failure.

    Args:
        number: Number of a new file that is open for writing.
        pool: Threads that hash and write, the parts in their order.
        buffers: Free memory of `PART_BYTES` each, for parts that come in pieces; one more than the pool has threads.

    Attributes:
        num_bytes: Size up to now.
    """

    def __init__(self, number: int, pool: ThreadPoolExecutor, buffers: queue.SimpleQueue[Tensor]) -> None:
        self.num_bytes = 0
        self._number, self._pool, self._buffers = number, pool, buffers
        self._parts: list[Future[bytes]] = []
        self._buffer: Tensor | None = None
        self._made: list[Callable[[memoryview], None]] = []
        self._failure: OSError | None = None

    def write(self, data: bytes) -> None:
        """Write a few bytes."""
        self.write_tensor(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def write_tensor(self, content: Tensor, record: Record | None = None) -> None:
        """Write bytes, of any device, which must not change before `wait`; a record takes their CRC-32."""
        at, size = 0, content.numel()
        while at < size and self._failure is None:
            if content.device.type == "cpu" and self._buffer is None and size - at >= PART_BYTES:
                if record is not None:
                    self._made.append(partial(_check, 0, PART_BYTES, record.piece(PART_BYTES)))
                self._submit(_memory(content[at : at + PART_BYTES]))
                at += PART_BYTES
                continue
            buffer, begin, count = self._room(size - at)
            buffer[begin : begin + count].copy_(content[at : at + count])
            if record is not None:
                self._made.append(partial(_check, begin, begin + count, record.piece(count)))
            at += count
            self._filled(count)

    def write_later(self, size: int, make: Callable[[], bytes]) -> None:
        """Write so many bytes, which a thread of the pool makes of what stands before them."""
        at = 0
        while at < size and self._failure is None:
            _, begin, count = self._room(size - at)
            self._made.append(partial(_put, begin, count, make, at))
            at += count
            self._filled(count)

    def _room(self, size: int) -> tuple[Tensor, int, int]:
        """Return memory for the next bytes: a part, the place in it, and for how many."""
        self._buffer = self._buffers.get() if self._buffer is None else self._buffer
        begin = self.num_bytes % PART_BYTES
        return self._buffer, begin, min(PART_BYTES - begin, size)

    def _filled(self, count: int) -> None:
        self.num_bytes += count
        if self.num_bytes % PART_BYTES == 0:
            self._end_part(PART_BYTES)

    def _end_part(self, count: int) -> None:
        buffer, self._buffer = self._buffer, None
        assert buffer is not None, "it was filled"
        self.num_bytes -= count
        self._submit(_memory(buffer[:count]))
        self._parts[-1].add_done_callback(lambda _: self._buffers.put(buffer))

    def _submit(self, part: memoryview) -> None:
        made, self._made = self._made, []
        self._parts.append(self._pool.submit(self._store, part, self.num_bytes, made))
        self.num_bytes += part.nbytes

    def _store(self, part: memoryview, at: int, made: Sequence[Callable[[memoryview], None]]) -> bytes:
        for make in made:
            make(part)
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

    def wait(self) -> None:
        """Wait until nothing is being written."""
        wait(self._parts)

    def finish(self) -> Entry:
        """Write what is left and return the file's entry; raise what prevented it."""
        if self._buffer is not None:
            self._end_part(self.num_bytes % PART_BYTES)
        digests = [part.result() for part in self._parts]
        if self._failure is not None:
            raise self._failure
        return Entry.of_parts(digests or [hashlib.sha256().digest()], num_bytes=self.num_bytes)


def _memory(part: Tensor) -> memoryview:
    values: Any = part.numpy()
    return memoryview(values)


def _check(begin: int, end: int, piece: Future[int], part: memoryview) -> None:
    """Compute the CRC-32 of a piece of a part; who waits for it gets its error."""
    try:
        piece.set_result(zlib.crc32(part[begin:end]))
    except BaseException as error:
        piece.set_exception(error)
        raise


def _put(begin: int, count: int, make: Callable[[], bytes], start: int, part: memoryview) -> None:
    """Put bytes into a part that are made of pieces before them: those in its own are made, earlier parts were begun earlier."""
    part[begin : begin + count] = make()[start : start + count]


def _force(number: int) -> None:
    """Force a file to disk, and close it."""
    try:
        os.fsync(number)
    finally:
        os.close(number)


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
        file.write_tensor(tensors[name].detach().contiguous().flatten().view(torch.uint8))


def _give_way() -> None:
    """Let other threads of the machine go first (man 2 setpriority: on Linux a thread has a priority of its own)."""
    if os.name == "posix":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
