"""Texts with labels: tokenised into rows of one text, each with the label of the text, or those of its words.

B: rows, S: tokens of a row, C: classes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from toolkit.config.job import LongRows, Packing
from toolkit.data.formats import CONVERSATION, Located
from toolkit.data.packing import ROUND_TO, DataReport
from toolkit.data.store import Columns, opened, stored
from toolkit.dataset_inspection.formats import Format, record_fault
from toolkit.dataset_inspection.labels import NOT_LEARNED, Labels, encode, label_fix
from toolkit.errors import DataError

# Segments are those of text pairs (`token_type_ids`), lengths the tokens of a text before it is cut.
_COLUMNS: Columns = {"labels": np.dtype(np.float32), "segments": np.dtype(np.int8), "lengths": np.dtype(np.int32)}


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelTokeniser:
    """Turns a batch of records into `input_ids`, `labels`, `segments` and `lengths`, for `datasets.Dataset.map`.

    A text has the special tokens that its tokenizer adds, also where it is cut. The words of a tagged text are joined by blanks;
    the first token with a letter of a word has its tag, the others and special tokens have none.

    Args:
        tokenizer: A `transformers` tokenizer.
        format: `text_label` or `tokens_tags`.
        labels: Labels of the model.
        max_length: Tokens to which longer texts are cut; None to cut none.
        origins: Where the records come from, for errors; None if only their number is known.
    """

    tokenizer: Any
    format: Format
    labels: Labels
    max_length: int | None
    origins: Located | None = None

    @property
    def identity(self) -> tuple[str, ...]:
        """What the tokens depend on besides tokenizer and documents."""
        return (self.format, self.labels.identity, str(self.max_length))

    @property
    def columns(self) -> dict[str, Any]:
        """The columns that a call returns, as features of `datasets`."""
        kinds = {"input_ids": "int32", **{name: str(dtype) for name, dtype in _COLUMNS.items()}}
        return {name: datasets.Sequence(datasets.Value(kind)) for name, kind in kinds.items()}

    def __call__(self, batch: Mapping[str, list[Any]], indices: list[int]) -> dict[str, list[list[float]]]:
        """Tokenise a batch.

        Raises:
            DataError: DATA_TYPE, DATA_LABELS, naming the record.
        """
        if CONVERSATION in batch:
            records = [json.loads(text) for text in batch[CONVERSATION]]
        else:
            records = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        found: dict[str, list[list[float]]] = {name: [] for name in ("input_ids", *_COLUMNS)}
        for index, record in zip(indices, records, strict=True):
            ids, labels, segments, length = self._document(record, index)
            found["input_ids"].append(ids)
            found["labels"].append(labels if ids else [])
            found["segments"].append(segments)
            found["lengths"].append([length] if ids else [])
        return found

    def _document(self, record: Mapping[str, Any], index: int) -> tuple[list[float], list[float], list[float], int]:
        if (fault := record_fault(record, self.format)) is not None:
            raise self._error("DATA_TYPE", index, fault, "Correct or remove the record")
        try:
            labels = encode(record, self.labels)
        except ValueError as error:
            values = [record.get("label" if self.labels.of_sequences else "tags")]
            raise self._error("DATA_LABELS", index, str(error), label_fix(self.labels, values)) from None
        texts = [record["text"], record.get("text_pair")] if self.labels.of_sequences else [" ".join(record["tokens"])]
        given = [text for text in texts if text is not None]
        encoded = self._encode(given, cut=False)
        length = len(encoded["input_ids"])
        if self.max_length is not None and length > self.max_length:
            encoded = self._encode(given, cut=True)
        ids = encoded["input_ids"]
        if not self.labels.of_sequences:
            labels = _tags_of_tokens(record["tokens"], labels, encoded["offset_mapping"])
        return ids, labels, encoded.get("token_type_ids") or [0] * len(ids), length

    def _encode(self, texts: list[str], *, cut: bool) -> dict[str, Any]:
        return self.tokenizer(  # type: ignore[no-any-return]
            *texts,
            truncation=cut,
            max_length=self.max_length if cut else None,
            return_offsets_mapping=not self.labels.of_sequences,
            verbose=False,
        )

    def _error(self, code: str, index: int, fault: str, fix: str) -> DataError:
        key, where = ("data", f"record {index + 1} of the data") if self.origins is None else self.origins.of(index)
        return DataError.of(code=code, key=key, message=f"{where}: {fault}", fix=fix)


def _tags_of_tokens(words: list[str], tags: list[float], offsets: list[tuple[int, int]]) -> list[float]:
    """Return the tag of each token: that of the word of its first letter, if no earlier token has one of it.

    >>> _tags_of_tokens(["New", "York"], [1, 2], [(0, 0), (0, 3), (3, 6), (6, 8), (0, 0)])
    [-100.0, 1.0, 2.0, -100.0, -100.0]
    """
    ends = np.cumsum([len(word) + 1 for word in words])  # one past the blank behind each word
    begins = ends - [len(word) + 1 for word in words]
    found, last = [float(NOT_LEARNED)] * len(offsets), -1
    for at, (start, end) in enumerate(offsets):
        if end <= start:
            continue
        word = int(np.searchsorted(ends, start, side="right"))
        if word < len(words) and start == begins[word] + len(words[word]) and end > ends[word]:
            word += 1  # it begins with the blank before the next word
        if last < word < len(words):
            found[at], last = float(tags[word]), word
    return found


class LabelledDataset:
    """Rows of one text each with their labels, built on access: as `PackedDataset` has them for `packing: none`.

    Args:
        documents: A `Dataset` of records in our own columns.
        tokeniser: Tokeniser of the records.
        sequence_length: Most tokens of a row.
        pad_token_id: Token that fills a row.
        long_rows: What becomes of texts that are longer: `truncate` and `refuse` keep them, `drop` leaves them out.
        cache_dir: Folder of the token files.
        num_proc: Processes that tokenise; this one if None.
    """

    packing: Packing = "none"

    def __init__(
        self,
        documents: Any,
        tokeniser: LabelTokeniser,
        *,
        sequence_length: int,
        pad_token_id: int,
        long_rows: LongRows | None,
        cache_dir: Path,
        num_proc: int | None = None,
    ) -> None:
        self.sequence_length = sequence_length
        self.pad_token_id = pad_token_id
        self.labels = tokeniser.labels
        folder, meta = stored(documents, tokeniser, _COLUMNS, cache_dir=cache_dir, num_proc=num_proc)
        self.num_empty, self.max_token = int(meta["num_empty"]), int(meta["max_token"])
        self.offsets: np.ndarray = np.load(folder / "offsets.npy")
        self._tokens = opened(folder / "tokens.bin", np.dtype(np.int32))
        self._labels, self._segments, self._lengths = (
            opened(folder / f"{name}.bin", dtype) for name, dtype in _COLUMNS.items()
        )
        self._has_pairs = bool(np.any(self._segments))
        fits = self._lengths <= sequence_length
        self._rows = np.flatnonzero(fits) if long_rows == "drop" else np.arange(len(self._lengths))
        self.report = self._report(num_long=int((~fits).sum()), dropped=long_rows == "drop")

    @property
    def per_token(self) -> bool:
        """Whether each token has a label."""
        return not self.labels.of_sequences

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Return row `index`: `input_ids`, shape (S,), int64, and `labels`.

        Labels of tokens have shape (S,), int64; of texts () with int64 for one class, and (C,) with float32 for several, or
        () for one number. With text pairs also `token_type_ids`.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"row={index} is not in 0 to {len(self) - 1}")
        document = int(self._rows[index])
        place = slice(int(self.offsets[document]), int(self.offsets[document + 1]))
        row = {"input_ids": self._tokens[place].astype(np.int64), "labels": self._labels_of(document, place)}
        if self._has_pairs:
            row["token_type_ids"] = self._segments[place].astype(np.int64)
        return row

    def _labels_of(self, document: int, place: slice) -> np.ndarray:
        if self.per_token:
            return np.asarray(self._labels[place].astype(np.int64))
        kind, size = self.labels.problem_type, len(self.labels.names)
        if kind == "single_label_classification":
            return np.asarray(int(self._labels[document]), np.int64)
        values = np.asarray(self._labels[document * size : (document + 1) * size], np.float32)
        return values.reshape(()) if kind == "regression" and size == 1 else values

    @property
    def document_tokens(self) -> np.ndarray:
        """Tokens of each text before it is cut, int64, shape (documents,)."""
        return self._lengths.astype(np.int64)

    @property
    def row_tokens(self) -> np.ndarray:
        """Tokens of each row without padding, int64, shape (rows,)."""
        return np.diff(self.offsets)[self._rows]

    def _report(self, *, num_long: int, dropped: bool) -> DataReport:
        lengths = self.row_tokens
        tokens = int(lengths.sum())
        padded = int(np.minimum(-(-lengths // ROUND_TO) * ROUND_TO, self.sequence_length).sum())
        learned = int((self._labels != NOT_LEARNED).sum()) if self.per_token else len(self)
        return DataReport(
            documents=len(self._lengths),
            sequences=len(self),
            tokens=tokens,
            target_tokens=learned,
            truncated=0 if dropped else num_long,
            dropped_long=num_long if dropped else 0,
            dropped_tokens=int(self._lengths.sum()) - tokens,
            dropped_documents=self.num_empty,
            dropped_sequences=0,
            padding_fraction=1 - tokens / padded if padded else 0.0,
        )


def ignored(labels: np.ndarray) -> np.ndarray:
    """Return labels of the same shape that do not count in the loss: -100, or NaN for numbers."""
    return np.full_like(labels, np.nan if labels.dtype.kind == "f" else NOT_LEARNED)
