"""Archives as `torch.save` writes them, whose CRC-32 several threads compute while the file is written.

`torch.save` copies each storage from a card as a whole, then computes its CRC-32, then hands it on, all in one thread.

Source:
    torch serialization.py _save; caffe2/serialize/inline_container.cc PyTorchStreamWriter; PKWARE APPNOTE 6.3.9, 4.3 and 4.5.3.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor
from torch.serialization import DEFAULT_PROTOCOL
from torch.storage import TypedStorage

if TYPE_CHECKING:
    from toolkit.checkpoint.files import HashedFile

_ALIGNMENT = 64  # of tensors in the file, as torch aligns them
_LARGE = 2**32 - 1  # sizes and offsets from here on stand in fields of 64 bits
_FLAGS = 1 << 3 | 1 << 11  # the CRC-32 follows the data; names are UTF-8
_VERSION, _VERSION_LARGE, _DATE = 20, 45, 1 << 5 | 1
_POLYNOMIAL = 0xEDB88320  # of CRC-32, lowest power in the highest bit


@final
@dataclass(slots=True)
class Record:
    """A file of an archive: where it is, and the CRC-32 of its pieces, which are computed in any order."""

    name: bytes
    offset: int
    num_bytes: int
    pieces: list[tuple[Future[int], int]] = field(default_factory=list)

    def piece(self, num_bytes: int) -> Future[int]:
        """Return what will be the CRC-32 of the next so many bytes."""
        self.pieces.append((Future(), num_bytes))
        return self.pieces[-1][0]

    def crc(self) -> int:
        """Return the CRC-32 of all pieces, after waiting for each."""
        crc = 0
        for piece, num_bytes in self.pieces:
            crc = _product(_power(num_bytes), crc) ^ piece.result()
        return crc

    def header(self) -> bytes:
        """Return what stands before the data, which begins at a multiple of the alignment."""
        large = self.num_bytes >= _LARGE
        extra = struct.pack("<HHQQ", 1, 16, self.num_bytes, self.num_bytes) if large else b""
        padding = -(self.offset + 30 + len(self.name) + len(extra) + 4) % _ALIGNMENT
        extra += struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        size = _LARGE if large else 0
        version = _VERSION_LARGE if large else _VERSION
        sizes = (0, size, size, len(self.name), len(extra))
        return struct.pack("<4sHHHHHIIIHH", b"PK\3\4", version, _FLAGS, 0, 0, _DATE, *sizes) + self.name + extra

    @property
    def num_bytes_after(self) -> int:
        """Size of what stands after the data."""
        return 24 if self.num_bytes >= _LARGE else 16

    def after(self) -> bytes:
        """Return what stands after the data."""
        layout = "<4sIQQ" if self.num_bytes >= _LARGE else "<4sIII"
        return struct.pack(layout, b"PK\7\10", self.crc(), self.num_bytes, self.num_bytes)

    def entry(self, crc: int) -> bytes:
        """Return its entry in the directory."""
        large = [value for value in (self.num_bytes, self.num_bytes, self.offset) if value >= _LARGE]
        extra = struct.pack(f"<HH{len(large)}Q", 1, 8 * len(large), *large) if large else b""
        version = _VERSION_LARGE if large else _VERSION
        size, offset = min(self.num_bytes, _LARGE), min(self.offset, _LARGE)
        fields = (_FLAGS, 0, 0, _DATE, crc, size, size, len(self.name), len(extra), 0, 0, 0, 0, offset)
        return struct.pack("<4sHHHHHHIIIHHHHHII", b"PK\1\2", version, version, *fields) + self.name + extra


def write_archive(value: Any, file: HashedFile) -> None:
    """Write what `torch.save(value)` would write, tensors as those of the CPU.

    A tensor that is a contiguous part of a larger storage is written without the rest, and once if several are the same part.
    """
    tensors: list[Tensor] = []
    described = io.BytesIO()
    _Pickler(described, tensors).dump(value)
    records: list[Record] = []

    def add(name: str, content: Tensor) -> None:
        record = Record(f"archive/{name}".encode(), file.num_bytes, content.numel())
        records.append(record)
        file.write(record.header())
        file.write_tensor(content, record)
        file.write_later(record.num_bytes_after, record.after)

    add("data.pkl", _of(described.getvalue()))
    add("byteorder", _of(sys.byteorder.encode()))
    for index, tensor in enumerate(tensors):
        add(f"data/{index}", tensor)
    add("version", _of(b"3\n"))  # kProducedFileFormatVersion of torch's inline_container.h
    size = sum(len(record.entry(0)) for record in records)
    start = file.num_bytes
    file.write_later(size, partial(_directory, records))
    file.write(_end(len(records), size, start))


def _of(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _directory(records: Iterable[Record]) -> bytes:
    return b"".join(record.entry(record.crc()) for record in records)


def _end(count: int, size: int, start: int) -> bytes:
    version = _VERSION_LARGE
    large = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, version, version, 0, 0, count, count, size, start)
    place = struct.pack("<4sIQI", b"PK\6\7", 0, start + size, 1)
    few = min(count, 2**16 - 1)
    end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, few, few, min(size, _LARGE), min(start, _LARGE), 0)
    return large + place + end


@final
class _Part:
    """A tensor whose own bytes are written, in place of its storage."""

    def __init__(self, tensor: Tensor, storage: Any) -> None:
        self.tensor, self.storage = tensor, storage


@final
class _Pickler(pickle.Pickler):
    """Describes a value; its tensors' bytes are added to a list.

    Args:
        file: Takes the description.
        tensors: Takes the bytes of each storage.
    """

    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file, protocol=DEFAULT_PROTOCOL)
        self._tensors = tensors
        self._numbers: dict[tuple[Any, ...], int] = {}

    def reducer_override(self, found: Any) -> Any:
        if type(found) is not Tensor or not is_part(found):
            return NotImplemented
        whole: Any = found
        build, arguments = whole.__reduce_ex__(DEFAULT_PROTOCOL)[:2]
        if build is not torch._utils._rebuild_tensor_v2:
            return NotImplemented
        storage, _, *others = arguments
        return build, (_Part(found, storage), 0, *others)

    def persistent_id(self, found: Any) -> Any:
        storage: Any = found.storage if isinstance(found, _Part) else found
        if isinstance(storage, TypedStorage):
            typed: Any = storage
            dtype, kind, storage = typed.dtype, getattr(torch, typed._pickle_storage_type()), typed._untyped_storage
        elif isinstance(storage, torch.UntypedStorage):
            dtype, kind = torch.uint8, torch.UntypedStorage
        else:
            return None
        held = content_of(found.tensor)[0] if isinstance(found, _Part) else _whole(storage)
        key = (held.data_ptr(), held.numel(), str(held.device), *((dtype,) if held.numel() else (len(self._tensors),)))
        number = self._numbers.setdefault(key, len(self._tensors))
        if number == len(self._tensors):
            self._tensors.append(held)
        return ("storage", kind, str(number), "cpu", held.numel() // dtype.itemsize)


def content_of(tensor: Tensor) -> tuple[Tensor, int]:
    """Return the bytes that a tensor needs, which share its memory, and its place in them, in elements.

    Those of a contiguous part of a larger storage are its own; others need all of their storage.
    """
    storage, offset = tensor.untyped_storage(), int(tensor.storage_offset())
    if not is_part(tensor):
        return _whole(storage), offset
    return _bytes_of(storage, offset * tensor.itemsize, tensor.numel() * tensor.itemsize), 0


def is_part(tensor: Tensor) -> bool:
    """Return whether a tensor is a contiguous part of a larger storage."""
    return tensor.is_contiguous() and tensor.numel() * tensor.itemsize < tensor.untyped_storage().nbytes()


def _whole(storage: torch.UntypedStorage) -> Tensor:
    return _bytes_of(storage, 0, storage.nbytes())


def _bytes_of(storage: torch.UntypedStorage, start: int, size: int) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, start, (size,), (1,))


# The CRC-32 of what stands before n bytes is multiplied by x to the 8n, modulo the polynomial, as zlib's crc32_combine does.
def _product(one: int, other: int) -> int:
    product, bit = 0, 1 << 31
    while bit:
        if one & bit:
            product ^= other
        other = other >> 1 ^ (_POLYNOMIAL if other & 1 else 0)
        bit >>= 1
    return product


@cache
def _power(num_bytes: int) -> int:
    power, square = 1 << 31, 1 << 23  # 1, and x to the 8th
    while num_bytes:
        if num_bytes & 1:
            power = _product(square, power)
        square = _product(square, square)
        num_bytes >>= 1
    return power
