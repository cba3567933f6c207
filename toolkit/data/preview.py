"""What a run would learn from: the figures of its packed data, and rows as text with a mark on what is in the loss."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from typing import Any

import numpy as np

from toolkit.data.labelled import LabelledDataset
from toolkit.data.packing import PackedDataset
from toolkit.data.prepare import PreparedData
from toolkit.data.streaming import StreamedRows
from toolkit.modeling.loss import IGNORED

STREAMED = 1000  # documents of a stream that are looked at


def preview(data: PreparedData, tokenizer: Any, *, rows: int) -> dict[str, Any]:
    """Return the figures of prepared data and its first rows in the order of the files.

    Args:
        data: Prepared data.
        tokenizer: Tokenizer that made it, which decodes the rows.
        rows: Number of rows to decode.
    Returns:
        As JSON: format, warnings, sources (name, records, documents of an epoch), streamed (whether train is the first documents
        of a stream), train and eval (figures, or null), eval_sets (figures by name), and rows (row, tokens, learned, padding, and text: pairs
        of a text and whether its tokens are in the loss).
    """
    train = data.train.head(STREAMED) if isinstance(data.train, StreamedRows) else data.train
    return {
        "format": data.format,
        "warnings": list(data.warnings),
        "sources": [asdict(share) for share in data.sources],
        "streamed": isinstance(data.train, StreamedRows),
        "train": _figures(train),
        "eval": None if data.eval is None else _figures(data.eval),
        "eval_sets": {name: _figures(held) for name, held in data.eval_sets.items()},
        "rows": [_row(train, index, tokenizer) for index in range(min(rows, len(train)))],
    }


def _figures(dataset: PackedDataset | LabelledDataset) -> dict[str, Any]:
    """Return the statistics of packing, and the tokens of the documents before it."""
    lengths = dataset.document_tokens
    median, p95 = (int(np.quantile(lengths, share, method="nearest")) for share in (0.5, 0.95))
    return {
        **asdict(dataset.report),
        "packing": dataset.packing,
        "per_token": dataset.per_token,
        "sequence_length": dataset.sequence_length,
        "document_tokens": {
            "median": median,
            "p95": p95,
            "max": int(lengths.max()),
            "total": int(lengths.sum()),
        },
    }


def _row(dataset: PackedDataset | LabelledDataset, index: int, tokenizer: Any) -> dict[str, Any]:
    row, num_tokens = dataset[index], int(dataset.row_tokens[index])
    if isinstance(dataset, LabelledDataset):
        return _labelled_row(dataset, index, tokenizer)
    learned = row["labels"][:num_tokens] != IGNORED
    return {
        "row": index,
        "tokens": num_tokens,
        "learned": int(learned.sum()),
        "padding": len(row["labels"]) - num_tokens,
        "text": _spans(row["input_ids"][:num_tokens].tolist(), learned, tokenizer),
    }


def _labelled_row(dataset: LabelledDataset, index: int, tokenizer: Any) -> dict[str, Any]:
    """Return a text and its labels behind it; of tags each behind the tokens of its word."""
    row = dataset[index]
    ids, labels, names = row["input_ids"].tolist(), row["labels"], dataset.labels.names
    found = {"row": index, "tokens": len(ids), "learned": 1, "padding": 0}
    if not dataset.per_token:
        label = np.atleast_1d(labels)
        if dataset.labels.problem_type == "single_label_classification":
            said = names[int(labels)]
        elif dataset.labels.problem_type == "regression":
            said = ", ".join(f"{value:g}" for value in label)
        else:
            said = ", ".join(name for name, has in zip(names, label, strict=True) if has)
        return {**found, "text": [(tokenizer.decode(ids), False), (f" → {said}", True)]}
    learned = [at for at, tag in enumerate(labels.tolist()) if tag != IGNORED]
    bounds = [0, *learned, len(ids)] if learned[:1] != [0] else [*learned, len(ids)]
    text: list[tuple[str, bool]] = []
    for start, stop in itertools.pairwise(bounds):
        text.append((tokenizer.decode(ids[start:stop]), False))
        if labels[start] != IGNORED:
            text.append((f" [{names[int(labels[start])]}] ", True))
    return {**found, "learned": len(learned), "text": text}


def _spans(ids: list[int], learned: np.ndarray, tokenizer: Any) -> list[tuple[str, bool]]:
    """Decode runs of tokens that are learned, or not, each as what it adds to the text before: so that blanks stay."""
    bounds = [0, *(np.flatnonzero(np.diff(learned)) + 1).tolist(), len(ids)]
    spans, before = [], ""
    for start, stop in itertools.pairwise(bounds):
        text = tokenizer.decode(ids[:stop], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if not text.startswith(before):  # the run begins inside a character
            text = before + tokenizer.decode(ids[start:stop], skip_special_tokens=False)
        spans.append((text[len(before) :], bool(learned[start])))
        before = text
    return spans
