"""Packing of documents, or parts of them, into sequences of a fixed length."""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Any

import numpy as np

from toolkit.config.job import LongRows, Packing
from toolkit.data.store import TokenStore
from toolkit.modeling.loss import IGNORED

ROUND_TO = 8  # tokens: bf16 tensor cores want matrix sizes in multiples of 8 (NVIDIA, Matrix Multiplication Guide)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReport:
    """Statistics of the packing of documents.

    Args:
        documents: Number of documents with at least one token.
        sequences: Number of rows to train on.
        tokens: Number of tokens in them, without padding.
        target_tokens: Number of tokens in the loss.
        truncated: Number of documents that do not fit a row and are truncated or split; of `wrapped` rows also those split
            where a row ends.
        dropped_long: Number of documents that are left out because they are longer than a row (`long_rows: drop`).
        dropped_tokens: Number of tokens in no row: truncated, after the last full row (`wrapped`), or in a dropped document
            or row.
        dropped_documents: Number of documents without a token, which are left out.
        dropped_sequences: Number of rows that are left out because no token of theirs is in the loss.
        padding_fraction: Share of padding in the rows; for `none`, where a row is padded to the longest of its micro-batch,
            a lower bound: each row alone, padded to a multiple of 8.
    """

    documents: int
    sequences: int
    tokens: int
    target_tokens: int
    truncated: int
    dropped_long: int
    dropped_tokens: int
    dropped_documents: int
    dropped_sequences: int
    padding_fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """Token ranges of the store, row by row.

    Args:
        starts: First token of each range, int64.
        stops: One past its last token, int64.
        opens: Whether the first token of each range has no token before it that predicts it.
        rows: Row r consists of ranges rows[r] to rows[r + 1], excluded; int64, shape (sequences + 1,).
    """

    starts: np.ndarray
    stops: np.ndarray
    opens: np.ndarray
    rows: np.ndarray


class PackedDataset:
    """Sequences of a token store under one kind of packing; rows are built on access.

    Labels have the positions of their own tokens (the model shifts them), and the first label of every row, and of every
    document whose attention stays in it, is -100, so that `(labels != -100).sum()` is the number of tokens in the loss.
    """

    per_token = True  # what the labels are of

    def __init__(
        self,
        store: TokenStore,
        *,
        packing: Packing,
        sequence_length: int,
        pad_token_id: int,
        long_rows: LongRows | None = None,
        processor: Any = None,
    ) -> None:
        self.processor = processor
        self.packing = packing
        self.sequence_length = sequence_length
        self.pad_token_id = pad_token_id
        self._store = store
        self._long_rows = long_rows or ("truncate" if packing == "none" else "split")
        pieces = pack(store.offsets, sequence_length, packing=packing, long_rows=self._long_rows)
        counts = _targets_by_row(store.targets, pieces)
        self._pieces = _keep_rows(pieces, counts > 0)
        self.report = self._report(num_dropped=int((counts == 0).sum()), target_tokens=int(counts.sum()))

    def __len__(self) -> int:
        return len(self._pieces.rows) - 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return row `index`: `input_ids` and `labels`, and for `separated` also `position_ids`; int64. For a model that reads images
        also `images`, with where they are.

        `wrapped` and `separated` rows have sequence_length tokens, `none` rows at most that many.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"row={index} is not in 0 to {len(self) - 1}")
        numbers = range(int(self._pieces.rows[index]), int(self._pieces.rows[index + 1]))
        parts = [self._piece(number) for number in numbers]
        tail = self.sequence_length - sum(len(ids) for ids, _ in parts)
        if self.packing == "separated" and tail:
            parts.append((np.full(tail, self.pad_token_id), np.full(tail, IGNORED)))
        row: dict[str, Any] = {
            "input_ids": np.concatenate([ids for ids, _ in parts]),
            "labels": np.concatenate([x for _, x in parts]),
        }
        if self._store.images is not None:
            row["images"] = self._store.images[int(self.row_documents[index])]
        if self.packing == "separated":
            row["position_ids"] = np.concatenate([np.arange(len(ids)) for ids, _ in parts])
        return row

    @property
    def document_tokens(self) -> np.ndarray:
        """Tokens of each document before packing, int64, shape (documents,)."""
        return np.diff(self._store.offsets)

    @property
    def row_documents(self) -> np.ndarray:
        """The document with which each row begins, int64, shape (sequences,)."""
        first = self._pieces.starts[self._pieces.rows[:-1]]
        return np.asarray(np.searchsorted(self._store.offsets, first, side="right") - 1)

    @property
    def images(self) -> Any:
        """The images of each document (`TokenStore.images`); None for text alone."""
        return self._store.images

    @property
    def row_tokens(self) -> np.ndarray:
        """Tokens of each row without padding, int64, shape (sequences,)."""
        running = np.concatenate([np.zeros(1, np.int64), np.cumsum(self._pieces.stops - self._pieces.starts)])
        return np.diff(running[self._pieces.rows])

    def _piece(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        place = slice(int(self._pieces.starts[number]), int(self._pieces.stops[number]))
        ids = self._store.tokens[place].astype(np.int64)
        labels = np.where(self._store.targets[place] != 0, ids, IGNORED)
        if self._pieces.opens[number]:
            labels[0] = IGNORED
        return ids, labels

    def _report(self, *, num_dropped: int, target_tokens: int) -> DataReport:
        lengths = self._pieces.stops - self._pieces.starts
        offsets, size = self._store.offsets, self.sequence_length
        tokens = int(lengths.sum())
        padded = len(self) * size
        if self.packing == "none":
            padded = int(np.minimum(-(-lengths // ROUND_TO) * ROUND_TO, size).sum())
        long = int((np.diff(offsets) > size).sum())
        dropped_long = long if self._long_rows == "drop" else 0
        truncated = long - dropped_long
        if self.packing == "wrapped" and self._long_rows in ("split", "refuse"):
            truncated = int((offsets[:-1] // size != (offsets[1:] - 1) // size).sum())
        return DataReport(
            documents=self._store.num_documents,
            sequences=len(self),
            tokens=tokens,
            target_tokens=target_tokens,
            truncated=truncated,
            dropped_long=dropped_long,
            dropped_tokens=int(offsets[-1]) - tokens,
            dropped_documents=self._store.num_empty,
            dropped_sequences=num_dropped,
            padding_fraction=1 - tokens / padded if padded else 0.0,
        )


def pack(offsets: np.ndarray, sequence_length: int, *, packing: Packing, long_rows: LongRows) -> Pieces:
    """Return the rows of documents.

    Args:
        offsets: Document d has the tokens offsets[d] to offsets[d + 1] of the store.
        sequence_length: Tokens of a row.
        packing: How documents become rows.
        long_rows: What becomes of documents that are longer than a row; `refuse` truncates, as the caller refuses them.
    """
    if packing == "wrapped" and long_rows in ("split", "refuse"):
        return wrap(offsets, sequence_length)
    starts, stops = _FITTERS[long_rows](offsets, sequence_length)
    if packing == "wrapped":
        return join(starts, stops, sequence_length)
    if packing == "separated":
        return separate(starts, stops, sequence_length)
    return Pieces(starts=starts, stops=stops, opens=np.ones(len(starts), bool), rows=np.arange(len(starts) + 1))


def wrap(offsets: np.ndarray, sequence_length: int) -> Pieces:
    """Join all documents and cut every `sequence_length` tokens; the rest at the end is dropped."""
    starts = np.arange(int(offsets[-1]) // sequence_length, dtype=np.int64) * sequence_length
    rows = np.arange(len(starts) + 1)
    return Pieces(starts=starts, stops=starts + sequence_length, opens=np.ones(len(starts), bool), rows=rows)


def join(starts: np.ndarray, stops: np.ndarray, sequence_length: int) -> Pieces:
    """Join parts of documents and cut every `sequence_length` tokens; the rest at the end is dropped."""
    ends = np.cumsum(stops - starts)
    total = int(ends[-1]) // sequence_length * sequence_length if len(ends) else 0
    cuts = np.arange(0, total + 1, sequence_length)
    places = np.unique(np.concatenate([cuts, ends[ends < total]]))  # in the joined tokens
    first, last = places[:-1], places[1:]
    document = np.searchsorted(ends, first, side="right")
    begin = starts[document] + first - (ends[document] - (stops - starts)[document])
    return Pieces(
        starts=begin,
        stops=begin + last - first,
        opens=first % sequence_length == 0,
        rows=np.searchsorted(first, cuts),
    )


def split(offsets: np.ndarray, sequence_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Split each document that is longer than a row into full rows and a remainder."""
    pieces_per_document = -(-np.diff(offsets) // sequence_length)
    first = np.repeat(offsets[:-1], pieces_per_document)
    nth = np.arange(len(first)) - np.repeat(np.cumsum(pieces_per_document) - pieces_per_document, pieces_per_document)
    starts = first + nth * sequence_length
    return starts, np.minimum(starts + sequence_length, np.repeat(offsets[1:], pieces_per_document))


def truncate(offsets: np.ndarray, sequence_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Truncate each document that is longer than a row."""
    return offsets[:-1], np.minimum(offsets[1:], offsets[:-1] + sequence_length)


def drop(offsets: np.ndarray, sequence_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Leave out each document that is longer than a row."""
    kept = np.diff(offsets) <= sequence_length
    return offsets[:-1][kept], offsets[1:][kept]


_FITTERS = {"split": split, "truncate": truncate, "refuse": truncate, "drop": drop}


def separate(starts: np.ndarray, stops: np.ndarray, sequence_length: int) -> Pieces:
    """Pack ranges of at most a row into rows, longest first, each into the fullest row with room (best-fit decreasing).

    Ranges of a row keep the file's order, and rows are ordered by their first one.

    Source:
        arXiv 2404.10830 (section 3): best-fit packing.
    """
    lengths = stops - starts
    longest_first = np.argsort(-lengths, kind="stable")
    row_of = _best_fit(lengths[longest_first].tolist(), sequence_length)
    row_of_piece = np.empty(len(starts), np.int64)
    row_of_piece[longest_first] = row_of
    num_rows = int(row_of_piece.max(initial=-1)) + 1
    first_piece = np.full(num_rows, len(starts))
    np.minimum.at(first_piece, row_of_piece, np.arange(len(starts)))
    rank = np.empty(num_rows, np.int64)
    rank[np.argsort(first_piece, kind="stable")] = np.arange(num_rows)
    row_of_piece = rank[row_of_piece]
    order = np.argsort(row_of_piece, kind="stable")
    rows = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(row_of_piece, minlength=num_rows))])
    return Pieces(starts=starts[order], stops=stops[order], opens=np.ones(len(starts), bool), rows=rows)


def _best_fit(lengths: list[int], capacity: int) -> list[int]:
    """Return the row of each length; rows are numbered in the order in which they are opened."""
    rooms: list[int] = []  # sorted, each the remaining room of at least one row
    rows_by_room: dict[int, list[int]] = {}
    assigned, num_rows = [], 0
    for length in lengths:
        at = bisect.bisect_left(rooms, length)
        if at < len(rooms):
            room = rooms[at]
            row = rows_by_room[room].pop()
            if not rows_by_room[room]:
                del rows_by_room[room], rooms[at]
        else:
            room, row = capacity, num_rows
            num_rows += 1
        assigned.append(row)
        if left := room - length:
            if left not in rows_by_room:
                rows_by_room[left] = []
                bisect.insort(rooms, left)
            rows_by_room[left].append(row)
    return assigned


def _targets_by_row(targets: np.ndarray, pieces: Pieces) -> np.ndarray:
    """Count the targets of each row without the first token of each range that opens, which no earlier token predicts."""
    counts = np.zeros(len(pieces.starts), np.int64)
    first = pieces.starts + pieces.opens
    counted = np.flatnonzero(pieces.stops > first)
    counted = counted[np.argsort(pieces.starts[counted])]  # in file order, so that the array is read sequentially
    if len(counted):
        bounds = np.stack([first[counted], pieces.stops[counted]], axis=1).ravel()
        inside = bounds[:-1] if bounds[-1] == len(targets) else bounds
        counts[counted] = np.add.reduceat(targets, inside, dtype=np.int64)[::2]
    running = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    return np.asarray(running[pieces.rows[1:]] - running[pieces.rows[:-1]])


def _keep_rows(pieces: Pieces, kept: np.ndarray) -> Pieces:
    sizes = np.diff(pieces.rows)
    piece_kept = np.repeat(kept, sizes)
    rows = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes[kept])])
    return Pieces(
        starts=pieces.starts[piece_kept], stops=pieces.stops[piece_kept], opens=pieces.opens[piece_kept], rows=rows
    )
