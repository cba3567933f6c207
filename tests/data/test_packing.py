"""Packing: every token goes where the rule says, and the report counts it."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.data.packing import PackedDataset, pack, separate, split
from toolkit.data.store import TokenStore

PAD = 0
LENGTHS = st.lists(st.integers(1, 40), min_size=0, max_size=60)


def store(lengths: list[int], targets: list[int] | None = None) -> TokenStore:
    """Documents whose tokens are 1, 2, 3 ... through all of them, so that each is known by its id."""
    total = sum(lengths)
    return TokenStore(
        tokens=np.arange(1, total + 1, dtype=np.int32),
        targets=np.asarray(targets if targets is not None else [1] * total, dtype=np.uint8),
        offsets=np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64),
        max_token=total,
        num_empty=0,
    )


def packed(
    lengths: list[int], packing: Any, size: int = 8, targets: list[int] | None = None, long_rows: Any = None
) -> PackedDataset:
    options = {"sequence_length": size, "pad_token_id": PAD, "long_rows": long_rows}
    return PackedDataset(store(lengths, targets), packing=packing, **options)


def test_wrapped_cuts_the_joined_documents() -> None:
    dataset = packed([3, 7, 2, 9], "wrapped")
    assert [row["input_ids"].tolist() for row in dataset] == [list(range(1, 9)), list(range(9, 17))]
    assert dataset[1]["labels"].tolist() == [-100, *range(10, 17)]
    assert set(dataset[0]) == {"input_ids", "labels"}
    report = dataset.report
    assert (report.documents, report.sequences, report.tokens, report.dropped_tokens) == (4, 2, 16, 5)
    assert (report.target_tokens, report.truncated, report.padding_fraction) == (14, 2, 0.0)


def test_separated_fits_whole_documents_and_restarts_positions() -> None:
    dataset = packed([3, 7, 5, 19, 1], "separated")
    rows = [row["input_ids"].tolist() for row in dataset]
    assert rows == [
        [1, 2, 3, *range(11, 16)],
        [*range(4, 11), 35],
        list(range(16, 24)),
        list(range(24, 32)),
        [32, 33, 34, *[PAD] * 5],
    ]
    assert dataset[0]["position_ids"].tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert dataset[4]["position_ids"].tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert dataset[0]["labels"].tolist() == [-100, 2, 3, -100, 12, 13, 14, 15]
    assert dataset[4]["labels"].tolist() == [-100, 33, 34, *[-100] * 5]
    report = dataset.report
    assert (report.tokens, report.dropped_tokens, report.truncated) == (35, 0, 1)
    assert report.padding_fraction == pytest.approx(5 / 40)
    assert report.target_tokens == sum(int((row["labels"] != -100).sum()) for row in dataset)


def test_none_truncates_each_document() -> None:
    dataset = packed([3, 12], "none")
    assert [row["input_ids"].tolist() for row in dataset] == [[1, 2, 3], list(range(4, 12))]
    report = dataset.report
    assert (report.truncated, report.dropped_tokens, report.padding_fraction) == (1, 4, 1 - 11 / 16)


def test_rows_without_targets_are_dropped_and_counted() -> None:
    dataset = packed([10, 4, 2], "none", targets=[0] * 9 + [1] + [1, 0, 0, 1] + [1, 0])
    assert [row["input_ids"].tolist() for row in dataset] == [[11, 12, 13, 14]]
    report = dataset.report
    assert (report.dropped_sequences, report.sequences, report.target_tokens, report.dropped_tokens) == (2, 1, 1, 12)


@pytest.mark.parametrize("index", [-1, 2])
def test_a_row_that_does_not_exist(index: int) -> None:
    with pytest.raises(IndexError):
        packed([8, 8], "wrapped")[index]


@settings(deadline=None)
@given(LENGTHS, st.integers(2, 24), st.sampled_from(["wrapped", "separated", "none"]), st.randoms())
def test_every_packing_keeps_its_promises(lengths: list[int], size: int, packing: Any, random: Any) -> None:
    targets = [random.randint(0, 1) for _ in range(sum(lengths))]
    dataset = packed(lengths, packing, size, targets)
    rows = list(dataset)
    kept = [token for row in rows for token in row["input_ids"].tolist() if token != PAD]
    report = dataset.report
    assert len(kept) == len(set(kept)) == report.tokens
    assert report.tokens + report.dropped_tokens == sum(lengths)
    assert report.target_tokens == sum(int((row["labels"] != -100).sum()) for row in rows)
    for row in rows:
        assert len(row["input_ids"]) <= size
        assert packing == "none" or len(row["input_ids"]) == size
        labels = row["labels"][row["labels"] != -100]
        assert len(labels)
        assert all(targets[label - 1] for label in labels)
        assert row["labels"][0] == -100


@settings(deadline=None)
@given(LENGTHS, st.integers(2, 24))
def test_separated_loses_nothing_and_splits_only_what_is_longer_than_a_row(lengths: list[int], size: int) -> None:
    offsets = store(lengths).offsets
    pieces = separate(*split(offsets, size), size)
    covered = sorted(zip(pieces.starts.tolist(), pieces.stops.tolist(), strict=True))
    expected = [
        (start, min(start + size, int(stop)))
        for begin, stop in itertools.pairwise(offsets)
        for start in range(int(begin), int(stop), size)
    ]
    assert covered == expected
    filled = [int((pieces.stops - pieces.starts)[a:b].sum()) for a, b in itertools.pairwise(pieces.rows)]
    assert all(0 < total <= size for total in filled)
    half_empty = [total for total in filled if 2 * total <= size]
    assert len(half_empty) <= 1  # two of them would have been one


def test_no_documents_make_no_rows() -> None:
    offsets = np.zeros(1, np.int64)
    for packing in ("wrapped", "separated", "none"):
        for long_rows in ("split", "truncate", "drop"):
            assert pack(offsets, 8, packing=packing, long_rows=long_rows).rows.tolist() == [0]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("packing", "long_rows", "rows"),
    [
        ("none", "split", [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11], [12, 13, 14], [15, 16]]),
        ("none", "drop", [[1, 2, 3], [15, 16]]),
        ("separated", "truncate", [[1, 2, 3, 15, 16, 0, 0, 0], [4, 5, 6, 7, 8, 9, 10, 11]]),
        ("separated", "drop", [[1, 2, 3, 15, 16, 0, 0, 0]]),
        ("wrapped", "truncate", [[1, 2, 3, 4, 5, 6, 7, 8]]),
        ("wrapped", "split", [[1, 2, 3, 4, 5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15, 16]]),
    ],
)
def test_what_becomes_of_a_document_longer_than_a_row(packing: Any, long_rows: Any, rows: list[list[int]]) -> None:
    dataset = packed([3, 11, 2], packing, long_rows=long_rows)
    assert [row["input_ids"].tolist() for row in dataset] == rows
    report = dataset.report
    assert report.dropped_long == (long_rows == "drop")
    assert report.tokens + report.dropped_tokens == 16
    assert dataset.row_tokens.tolist() == [sum(token != PAD for token in row) for row in rows]


@settings(deadline=None)
@given(LENGTHS, st.integers(2, 24), st.sampled_from(["truncate", "drop"]), st.randoms())
def test_wrapped_rows_are_the_stream_of_what_is_left(
    lengths: list[int], size: int, long_rows: Any, random: Any
) -> None:
    targets = [random.randint(0, 1) for _ in range(sum(lengths))]
    offsets = store(lengths).offsets.tolist()
    stream: list[int] = []
    for begin, stop in itertools.pairwise(offsets):
        if stop - begin <= size or long_rows == "truncate":
            stream += range(begin + 1, min(stop, begin + size) + 1)
    expected = [stream[at : at + size] for at in range(0, len(stream) // size * size, size)]
    dataset = packed(lengths, "wrapped", size, targets, long_rows)
    kept = [row for row in expected if any(targets[token - 1] for token in row[1:])]
    assert [row["input_ids"].tolist() for row in dataset] == kept
    for row in dataset:
        labels = [token if targets[token - 1] and at else -100 for at, token in enumerate(row["input_ids"].tolist())]
        assert row["labels"].tolist() == labels
    assert dataset.report.target_tokens == sum(int((row["labels"] != -100).sum()) for row in dataset)
