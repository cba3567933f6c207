"""Training data that is read, tokenised and packed while the run trains, and the position at which a resume goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets.distributed import split_dataset_by_node

from toolkit.config.job import Data, EvalSource, LongRows, Packing
from toolkit.config.user_code import imported
from toolkit.data.formats import Tokeniser
from toolkit.data.loader import Collate, StepBatch, pinned, prefetch
from toolkit.data.origins import place_of
from toolkit.data.packing import PackedDataset
from toolkit.data.sources import Kind, load_problem, load_source
from toolkit.data.store import TokenStore
from toolkit.dataset_inspection.columns import renamed, resolve_layout
from toolkit.dataset_inspection.inspect import SourceFacts, folder_of, unread_warning
from toolkit.dataset_inspection.layouts import Layout, unread_columns
from toolkit.dataset_inspection.user_function import applied
from toolkit.errors import DataError, Problem
from toolkit.modeling.loss import IGNORED

# A part of a document that fits a row (of `wrapped` rows, all of it): token ids, int32, and 1 for each in the loss, uint8.
Piece = tuple[np.ndarray, np.ndarray]
Row = dict[str, np.ndarray]
_READ = 16  # records that are tokenised together
_OPEN_ROWS = 64  # rows of `separated` documents that wait for one that fits; the fullest is then taken as it is
_STREAM = (
    2**33
)  # stream of the seed from which the shuffle draws, plus the rank; those of epochs and sources are smaller
BUFFER = 1000  # `data.shuffle_buffer` when left out, as in datasets


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedSource:
    """A source, how its records become ours, and how they are tokenised."""

    key: str
    facts: SourceFacts
    wanted: EvalSource
    layout: Layout
    kind: Kind
    dataset: Any
    preprocess: str | None

    def records(
        self, records: list[dict[str, Any]], place: Callable[[int], str]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield those that are used in our own columns, each after its index."""
        convert = self.layout.convert
        for index, record in _changed(records, self.preprocess, place):
            named = _renamed(record, self.wanted, key=self.key, name=self.facts.name)
            if convert is None:
                yield index, {column: named.get(column) for column in self.layout.reads if column in named}
                continue
            if (fault := self.layout.fault(named)) is not None:
                message, fix = f"{place(index)}: {fault}", "Correct or remove the record"
                raise DataError.of(code="DATA_TYPE", key=self.key, message=message, fix=fix)
            yield index, convert(named)


def open_source(
    facts: SourceFacts, wanted: EvalSource, data: Data, *, key: str, cache_dir: Path
) -> tuple[StreamedSource, list[str]]:
    """Return a source after a look at its first records, and the warning of what of them is not read.

    Raises:
        DataError: DATA_HUB, DATA_REVISION, DATA_JSON, DATA_READ, DATA_COLUMNS, DATA_FORMAT, DATA_PREPROCESS, DATA_TOO_SMALL.
    """
    dataset = load_source(facts, wanted, key=key, cache_dir=cache_dir, streaming=True)
    first = _taken(iter(dataset), facts, key=key)
    head = [record for _, record in _changed(first, data.preprocess, partial(place_of, facts))]
    if not head:
        message = f"{facts.name}: none of its first {_READ} records is to be trained on"
        raise DataError.of(code="DATA_TOO_SMALL", key=key, message=message, fix="Name data with documents")
    named = [_renamed(record, wanted, key=key, name=facts.name) for record in head]
    columns = tuple(dict.fromkeys(column for record in named for column in record))
    layout = resolve_layout(columns, wanted.format, key=key, name=facts.name)
    if isinstance(layout, Problem):
        raise DataError(layout)
    unread = [column for column in unread_columns(layout, columns) if any(record.get(column) for record in named)]
    source = StreamedSource(
        key=key,
        facts=facts,
        wanted=wanted,
        layout=layout,
        kind=Kind(layout.format, data.loss_of(wanted)),
        dataset=dataset,
        preprocess=data.preprocess,
    )
    return source, [unread_warning(facts.name, unread)] if unread else []


def _taken(records: Iterator[dict[str, Any]], source: SourceFacts, *, key: str) -> list[dict[str, Any]]:
    """Read the next records of a source; fewer at its end.

    Raises:
        DataError: DATA_HUB, DATA_JSON, DATA_READ.
    """
    try:
        return list(islice(records, _READ))
    except Exception as error:  # as in `load_source`, what reads them raises dozens of types
        raise DataError(load_problem(source, error, key=key)) from error


def _changed(
    records: list[dict[str, Any]], name: str | None, place: Callable[[int], str]
) -> Iterator[tuple[int, dict[str, Any]]]:
    function = None if name is None else imported("data.preprocess", name)
    for index, record in enumerate(records):
        made = record if function is None or name is None else applied(function, name, record, partial(place, index))
        if made is not None:
            yield index, made


def _renamed(record: Mapping[str, Any], wanted: EvalSource, *, key: str, name: str) -> dict[str, Any]:
    if not wanted.columns:
        return dict(record)
    names = renamed(tuple(record), wanted.columns, key=key, name=name)
    if isinstance(names, Problem):
        raise DataError(names)
    return {ours: record[theirs] for theirs, ours in names.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedRows:
    """Training data as a stream of rows, those that `PackedDataset` describes; each rank reads its own.

    An epoch has every document of every source once, one source after the other by turns of some records, while each lasts.

    Args:
        sources: The sources.
        tokenisers: Tokeniser of each.
        packing: How documents become rows. `separated`: each goes into the fullest of some open rows that has room.
        sequence_length: Tokens of a full row.
        pad_token_id: Token that fills a row.
        long_rows: What becomes of documents longer than a row; None for the default of the packing.
        shuffle_buffer: Documents from which the next is drawn.
        seed: Seed of what is drawn.
        check: Raises if the model lacks a token, given the largest id and the key of its source.
    """

    sources: tuple[StreamedSource, ...]
    tokenisers: tuple[Tokeniser, ...]
    packing: Packing
    sequence_length: int
    pad_token_id: int
    long_rows: LongRows | None
    shuffle_buffer: int
    seed: int
    check: Callable[[int, str], None]

    @property
    def per_token(self) -> bool:
        """Whether labels are those of tokens, as they always are."""
        return True

    @property
    def fitting(self) -> LongRows:
        """What becomes of documents longer than a row."""
        return self.long_rows or ("truncate" if self.packing == "none" else "split")

    def head(self, num_documents: int) -> PackedDataset:
        """Return the first documents, unshuffled, as packed rows of their own."""
        position = Position(self, dp_rank=0, dp_size=1)
        while not position.ended and len(position.documents) < num_documents:
            position.read(whole=True)
        documents = position.documents[:num_documents]
        if not documents:
            raise _too_small(self, "no record of the stream is a document with a token")
        lengths = [len(ids) for ids, _ in documents]
        ids = np.concatenate([np.empty(0, np.int32), *(ids for ids, _ in documents)])
        store = TokenStore(
            tokens=ids,
            targets=np.concatenate([np.empty(0, np.uint8), *(targets for _, targets in documents)]),
            offsets=np.cumsum([0, *lengths]),
            max_token=int(ids.max(initial=-1)),
            num_empty=0,
        )
        return PackedDataset(
            store,
            packing=self.packing,
            sequence_length=self.sequence_length,
            pad_token_id=self.pad_token_id,
            long_rows=self.long_rows,
        )


class Position:
    """One rank's place in the stream: what of each source is read, the documents to draw from, and rows that are not full.

    Args:
        rows: The stream.
        dp_rank: Data-parallel rank, which reads every dp_size-th shard of a source, or where they do not divide, record.
        dp_size: Number of data-parallel ranks.
        state: `as_saved(snapshot())` of an earlier one, of as many ranks; None to begin.
    """

    def __init__(
        self, rows: StreamedRows, *, dp_rank: int, dp_size: int, state: Mapping[str, Any] | None = None
    ) -> None:
        self._rows, self._rank, self._size = rows, dp_rank, dp_size
        self._sets = [split_dataset_by_node(source.dataset, dp_rank, dp_size) for source in rows.sources]
        self._iterators: list[Iterator[dict[str, Any]] | None] = [None] * len(self._sets)
        # Where sources go on that have not been read since a resume: datasets' state_dict says their beginning until then.
        self._resumed: list[dict[str, Any] | None] = [None] * len(self._sets)
        self._random = np.random.PCG64(np.random.SeedSequence([rows.seed, _STREAM + dp_rank]))
        self.epoch = 0
        self.documents: list[Piece] = []
        self._open: list[list[Piece]] = [[]]
        self._done = [False] * len(self._sets)
        self._read = [0] * len(self._sets)
        self._turn = self._barren = self._found = 0
        if state is not None:
            self._restore(state)

    @property
    def ended(self) -> bool:
        """Whether all of the epoch is read."""
        return all(self._done)

    def row(self) -> Row:
        """Return the next row with a token in the loss.

        Raises:
            DataError: DATA_HUB, DATA_JSON, DATA_READ; DATA_TYPE, DATA_LONG_ROWS, DATA_VOCAB, DATA_PREPROCESS, of a record; DATA_TOO_SMALL, if the data make no row.
        """
        make: dict[Packing, Callable[[], Row]] = {
            "wrapped": self._wrapped,
            "separated": self._separated,
            "none": lambda: self._built([self._draw()]),
        }
        while True:
            row = make[self._rows.packing]()
            if (row["labels"] != IGNORED).any():
                self._barren = 0
                return row

    def read(self, *, whole: bool = False) -> None:
        """Tokenise some records of the source whose turn it is.

        Args:
            whole: Whether documents longer than a row are left as they are.
        """
        while self._done[self._turn]:
            self._turn = (self._turn + 1) % len(self._sets)
        number, source, tokeniser = self._turn, self._rows.sources[self._turn], self._rows.tokenisers[self._turn]
        iterator = self._iterators[number]
        if iterator is None:
            iterator = self._iterators[number] = iter(self._sets[number])
        taken = _taken(iterator, source.facts, key=source.key)
        self._resumed[number] = None
        self._done[number] = len(taken) < _READ
        first = self._read[number]
        self._read[number] += len(taken)
        self._turn = (number + 1) % len(self._sets)
        place = _Place(source, first, self._rank, self._size)
        used = list(source.records(taken, place.words))
        columns = dict.fromkeys(column for _, record in used for column in record)
        made = replace(tokeniser, origins=place)({column: [record.get(column) for _, record in used] for column in columns}, [index for index, _ in used]) if used else {"input_ids": [], "targets": []}  # fmt: skip
        self._rows.check(max((max(ids, default=-1) for ids in made["input_ids"]), default=-1), source.key)
        for (index, _), ids, targets in zip(used, made["input_ids"], made["targets"], strict=True):
            if ids:
                piece = np.asarray(ids, np.int32), np.asarray(targets, np.uint8)
                fitted = [piece] if whole else self._fitted(piece, partial(place.of, index))
                self.documents += fitted
                self._found += len(fitted)

    def _fitted(self, piece: Piece, origin: Callable[[], tuple[str, str]]) -> list[Piece]:
        size, rule = self._rows.sequence_length, self._rows.fitting
        length = len(piece[0])
        if length <= size or (self._rows.packing == "wrapped" and rule == "split"):
            return [piece]
        if rule == "refuse":
            key, where = origin()
            message = f"{where} has {length:,} tokens, and train.sequence_length={size} under data.long_rows=refuse"
            fix = "Raise train.sequence_length, or set data.long_rows to truncate, split or drop"
            raise DataError.of(code="DATA_LONG_ROWS", key=key, message=message, fix=fix)
        starts = {"truncate": range(1), "drop": range(0), "split": range(0, length, size)}[rule]
        return [(piece[0][at : at + size], piece[1][at : at + size]) for at in starts]

    def _draw(self) -> Piece:
        """Return a document of those in the buffer, which is filled before; the epoch's last ones empty it."""
        while True:
            while not self.ended and len(self.documents) < self._rows.shuffle_buffer:
                self.read()
            if self.documents:
                # More than the buffer were read if it is smaller than what is tokenised together.
                return self.documents.pop(
                    int(self._random.random_raw()) % min(len(self.documents), self._rows.shuffle_buffer)
                )
            self._next_epoch()

    def _next_epoch(self) -> None:
        self._barren += 1
        if not self._found or self._barren > self._rows.sequence_length + _OPEN_ROWS:
            what = "have a token in the loss" if self._found else "are documents with a token"
            raise _too_small(self._rows, f"none of the records that rank {self._rank} of {self._size} reads {what}")
        self.epoch += 1
        self._found = self._turn = 0
        self._done, self._read = [False] * len(self._sets), [0] * len(self._sets)
        self._iterators, self._resumed = [None] * len(self._sets), [None] * len(self._sets)
        for dataset in self._sets:
            dataset.set_epoch(self.epoch)

    def _wrapped(self) -> Row:
        size, held = self._rows.sequence_length, self._open[0]
        have = sum(len(ids) for ids, _ in held)
        while have < size:
            held.append(self._draw())
            have += len(held[-1][0])
        ids, targets = (np.concatenate([piece[part] for piece in held]) for part in (0, 1))
        self._open[0] = [(ids[size:], targets[size:])] if have > size else []
        return self._built([(ids[:size], targets[:size])])

    def _separated(self) -> Row:
        size = self._rows.sequence_length
        while True:
            piece = self._draw()
            room = {at: size - sum(len(ids) for ids, _ in row) for at, row in enumerate(self._open)}
            fit = [at for at in room if room[at] >= len(piece[0])]
            best = min(fit, key=lambda at: (room[at], at)) if fit else len(self._open)
            if not fit:
                self._open.append([])
                room[best] = size
            self._open[best].append(piece)
            room[best] -= len(piece[0])
            if not room[best] or len(self._open) > _OPEN_ROWS:
                return self._built(self._open.pop(min(room, key=lambda at: (room[at], at))))

    def _built(self, pieces: list[Piece]) -> Row:
        ids = np.concatenate([ids for ids, _ in pieces]).astype(np.int64)
        labels = np.where(np.concatenate([targets for _, targets in pieces]) != 0, ids, IGNORED)
        lengths = [len(ids) for ids, _ in pieces]
        labels[np.cumsum([0, *lengths[:-1]])] = IGNORED
        if self._rows.packing != "separated":
            return {"input_ids": ids, "labels": labels}
        tail = self._rows.sequence_length - len(ids)
        return {
            "input_ids": np.concatenate([ids, np.full(tail, self._rows.pad_token_id)]),
            "labels": np.concatenate([labels, np.full(tail, IGNORED)]),
            "position_ids": np.concatenate([np.arange(length) for length in (*lengths, tail)]),
        }

    def snapshot(self) -> dict[str, Any]:
        """Return what a resume needs; documents are not copied."""
        return {
            "sources": [None if each is None else self._resumed[at] or self._sets[at].state_dict() for at, each in enumerate(self._iterators)],
            "counts": [self.epoch, self._turn, self._barren, self._found],
            "done": list(self._done),
            "read": list(self._read),
            "random": self._random.state,
            "documents": list(self.documents),
            "open": [list(row) for row in self._open],
        }  # fmt: skip

    def _restore(self, state: Mapping[str, Any]) -> None:
        said = json.loads(state["position"])
        self.epoch, self._turn, self._barren, self._found = said["counts"]
        self._done, self._read = said["done"], said["read"]
        self._random.state = said["random"]
        for number, (dataset, place) in enumerate(zip(self._sets, said["sources"], strict=True)):
            dataset.set_epoch(self.epoch)
            if place is not None:
                dataset.load_state_dict(place)
                self._iterators[number], self._resumed[number] = iter(dataset), place
        ends = np.cumsum(state["lengths"].numpy())[:-1]
        parts = (np.split(state[name].numpy(), ends) for name in ("tokens", "targets"))
        pieces = iter(list(zip(*parts, strict=True)) if len(state["lengths"]) else [])
        self.documents = list(islice(pieces, said["documents"]))
        self._open = [list(islice(pieces, count)) for count in said["open"]]


def _too_small(rows: StreamedRows, message: str) -> DataError:
    fix = "Give each rank documents to learn from: more of them, or a longer train.sequence_length"
    return DataError.of(code="DATA_TOO_SMALL", key=rows.sources[0].key, message=message, fix=fix)


def as_saved(snapshot: Mapping[str, Any]) -> dict[str, Any]:
    """Return a snapshot as text and tensors, which a checkpoint holds."""
    rows = snapshot["open"]
    pieces = [*snapshot["documents"], *(piece for row in rows for piece in row)]
    numbers = {"documents": len(snapshot["documents"]), "open": [len(row) for row in rows]}
    ids, targets = (
        np.concatenate([np.empty(0, dtype), *(piece[part] for piece in pieces)])
        for part, dtype in enumerate((np.int32, np.uint8))
    )
    return {
        "position": json.dumps({**snapshot, **numbers}),
        "lengths": torch.tensor([len(ids) for ids, _ in pieces], dtype=torch.int64),
        "tokens": torch.from_numpy(ids),
        "targets": torch.from_numpy(targets),
    }


class StreamLoader:
    """Iterates over optimizer steps of a stream, as `toolkit.data.loader.StepLoader` over those of packed rows.

    A stream is read in parts, as many as the run began with data-parallel ranks. Each part gives as many rows to every step, in the
    order of the parts, so a run that goes on with another number of ranks takes the same rows in each step: a rank reads the parts
    in which its rows lie, several where ranks are fewer, one that others read too where they are more.

    Args:
        rows: The stream.
        collate: Turns rows into tensors.
        micro_batch_size: Rows per forward pass.
        gradient_accumulation_steps: Micro-batches per step and rank.
        dp_rank: Data-parallel rank.
        dp_size: Number of data-parallel ranks.
        num_steps: Steps that are left.
        state: What `state` of earlier loaders has returned, with the parts of this rank; None to begin.
    """

    def __init__(
        self,
        rows: StreamedRows,
        *,
        collate: Collate,
        micro_batch_size: int,
        gradient_accumulation_steps: int,
        dp_rank: int,
        dp_size: int,
        num_steps: int,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self._rows, self._collate = rows, collate
        self._micro = micro_batch_size
        self._num_parts = dp_size if state is None else int(state["num_parts"])
        own = micro_batch_size * gradient_accumulation_steps
        self._per_part = own * dp_size // self._num_parts
        self._own = range(dp_rank * own, (dp_rank + 1) * own)
        parts = range(self._own.start // self._per_part, (self._own.stop - 1) // self._per_part + 1)
        self._num_steps = num_steps
        saved = {} if state is None else state["parts"]
        self._after = {part: self._position(part, saved.get(part)).snapshot() for part in parts}

    def __len__(self) -> int:
        return self._num_steps

    def __iter__(self) -> Iterator[StepBatch]:
        saved = self.state()["parts"]
        positions = {part: self._position(part, saved[part]) for part in self._after}
        for batch, after in prefetch(self._batches(positions)):
            self._after = after
            self._num_steps -= 1
            yield batch

    @property
    def epoch(self) -> int:
        """Number of whole passes over the data that this rank had read for the last step."""
        return min(int(after["counts"][0]) for after in self._after.values())

    def state(self) -> dict[str, Any]:
        """Return the position after the last step that was taken, as a checkpoint holds it."""
        return {
            "num_parts": self._num_parts,
            "parts": {part: as_saved(after) for part, after in self._after.items()},
        }

    def _position(self, part: int, state: Mapping[str, Any] | None) -> Position:
        return Position(self._rows, dp_rank=part, dp_size=self._num_parts, state=state)

    def _batches(self, positions: Mapping[int, Position]) -> Iterator[tuple[StepBatch, dict[int, dict[str, Any]]]]:
        for _ in range(self._num_steps):
            rows = []
            for part, position in positions.items():
                first = part * self._per_part
                made = [position.row() for _ in range(self._per_part)]
                rows += [row for at, row in enumerate(made, start=first) if at in self._own]
            starts = range(0, len(rows), self._micro)
            batches = [pinned(self._collate(rows[at : at + self._micro])) for at in starts]
            yield batches, {part: position.snapshot() for part, position in positions.items()}


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the records of a batch come from, for errors; indices are those within it."""

    source: StreamedSource
    first: int
    rank: int
    size: int

    def of(self, index: int) -> tuple[str, str]:
        return self.source.key, self.words(index)

    def folder(self, index: int) -> Path:
        return folder_of(self.source.facts.path)

    def words(self, index: int) -> str:
        if self.size == 1:
            return place_of(self.source.facts, self.first + index)
        return f"{self.source.facts.name}, record {self.first + index + 1} of those that rank {self.rank} of {self.size} reads"
