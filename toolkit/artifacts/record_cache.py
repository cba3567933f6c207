"""A folder of records that took long to make: read again while they are wanted, the oldest removed when it is full."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path
from typing import TypeVar

from toolkit.artifacts.records import Records
from toolkit.units import MIB

T = TypeVar("T")

MAX_BYTES = 256 * MIB
_SUFFIX = ".record"


class RecordCache:
    """Records on disk, by key; a damaged one counts as absent.

    Args:
        folder: Folder of the files; it is made for the first record, readable by its owner alone.
        max_bytes: Size of all files together, beyond which the least recently used are removed.
    """

    def __init__(self, folder: Path, *, max_bytes: int = MAX_BYTES) -> None:
        self.folder, self.max_bytes = folder, max_bytes

    def get(self, key: str, records: Records[T]) -> T | None:
        """Return the record of a key; None if there is none, or if it is damaged or of another schema."""
        path = self._path(key, records)
        try:
            digest, _, text = path.read_text("utf-8").partition("\n")
            if digest != _digest(text):
                raise ValueError("damaged")
            found = records.loads(text)
            os.utime(path)  # used now
        except OSError:
            return None
        except ValueError:
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        return found

    def put(self, key: str, value: T, records: Records[T]) -> None:
        """Keep a record; without a place to write it, do nothing.

        Raises:
            TypeError: The value does not fit the schema.
        """
        text = records.dumps(value)
        with contextlib.suppress(OSError):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.folder)
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    file.write(f"{_digest(text)}\n{text}")
                Path(name).replace(self._path(key, records))
            except BaseException:
                Path(name).unlink()
                raise
            self._trim()

    def _path(self, key: str, records: Records[T]) -> Path:
        return self.folder / (_digest(f"{records.schema} {key}") + _SUFFIX)

    def _trim(self) -> None:
        """Remove the least recently used files until the others fit."""
        found = sorted(((each.stat(), each) for each in self.folder.iterdir()), key=lambda pair: pair[0].st_mtime_ns)
        total = sum(stat.st_size for stat, _ in found)
        for stat, path in found:
            if total <= self.max_bytes:
                return
            with contextlib.suppress(OSError):
                path.unlink()
            total -= stat.st_size


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
