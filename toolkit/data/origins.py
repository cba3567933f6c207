"""The source, line and job key of each document, for errors: documents of several sources are joined, split and selected."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from toolkit.dataset_inspection.files import wide_cells
from toolkit.dataset_inspection.inspect import SourceFacts, folder_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The share of a source: its records that are used, and the documents that an epoch has of them."""

    name: str
    records: int
    documents: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Origins:
    """Where the documents of a data set come from.

    Args:
        sources: Sources that were joined, in order.
        keys: Key path of the job that names each source.
        counts: Records of each source.
        rows: Number of each document among all records of the sources, int64; None if all are there, in order.
        records: Number of each of these records in its source, int64, where some were left out; else None, or nothing for all sources.
    """

    sources: tuple[SourceFacts, ...]
    keys: tuple[str, ...]
    counts: tuple[int, ...]
    rows: np.ndarray | None = None
    records: tuple[np.ndarray | None, ...] = ()

    def shares(self) -> tuple[Share, ...]:
        """Return the share of each source in these documents."""
        bounds = np.cumsum([0, *self.counts])
        taken = self.counts if self.rows is None else np.histogram(self.rows, bounds - 0.5)[0].tolist()
        rows = zip(self.sources, self.counts, taken, strict=True)
        return tuple(Share(name=source.name, records=count, documents=number) for source, count, number in rows)

    def of(self, index: int) -> tuple[str, str]:
        """Return the key path of a document's source, and its place in words.

        Args:
            index: Index of the document in the data set, from 0.
        """
        source, key, number = self._record(index)
        return key, place_of(source, number)

    def folder(self, index: int) -> Path:
        """Return the folder from which paths in a document start: that of its file, or for a data set of the hub the working directory."""
        return folder_of(self._record(index)[0].path)

    def _record(self, index: int) -> tuple[SourceFacts, str, int]:
        """Return a document's source, its key path and the number of the record in it, from 0."""
        number = index if self.rows is None else int(self.rows[index])
        records = self.records or (None,) * len(self.counts)
        for source, key, count, left in zip(self.sources, self.keys, self.counts, records, strict=True):
            if number < count:
                return source, key, number if left is None else int(left[number])
            number -= count
        raise IndexError(f"index={index} is past the last record")


def place_of(source: SourceFacts, index: int) -> str:
    """Return the place of a record in words: its line where the source has lines, else its number.

    Args:
        source: Source of the record.
        index: Index of the record in the source, from 0.
    """
    line = None if source.path is None else _line_of(source.path, source.kind, index)
    return f"{source.name}, record {index + 1}" if line is None else f"{source.name}, record at line {line}"


def _line_of(path: Path, kind: str, index: int) -> int | None:
    """Return the line of a record, from 1, as `toolkit.dataset_inspection.files` counts; None if its file has no lines."""
    if kind == "txt":
        return index + 1
    lines = _json_lines(path) if kind in ("jsonl", "json") else _csv_lines(path) if kind == "csv" else iter(())
    return next(itertools.islice(lines, index, None), None)


def _json_lines(path: Path) -> Iterator[int]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            content = line.removeprefix(b"\xef\xbb\xbf").strip() if number == 1 else line.strip()
            if number == 1 and content.startswith(b"["):  # an array, whose records may lie on any line
                return
            if content:
                yield number


def _csv_lines(path: Path) -> Iterator[int]:
    with path.open(encoding="utf-8-sig", newline="") as file, wide_cells():
        rows = csv.reader(file)
        filled = (rows.line_num for row in rows if row)
        next(filled, None)  # the header
        yield from filled
