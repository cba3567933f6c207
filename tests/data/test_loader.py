"""Loading: the order is arithmetic, covers every row, resumes, and is the same for any number of ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.data.collate import Collator, MicroBatch
from toolkit.data.loader import EpochOrder, EvalLoader, StepLoader, num_steps, prefetch
from toolkit.data.packing import PackedDataset
from toolkit.data.store import TokenStore
from toolkit.errors import DataError


def dataset(num_rows: int, packing: Any = "wrapped") -> PackedDataset:
    """Row r holds the tokens 4r + 1 to 4r + 4."""
    store = TokenStore(
        tokens=np.arange(1, 4 * num_rows + 1, dtype=np.int32),
        targets=np.ones(4 * num_rows, np.uint8),
        offsets=np.arange(0, 4 * num_rows + 1, 4),
        max_token=4 * num_rows,
        num_empty=0,
    )
    return PackedDataset(store, packing=packing, sequence_length=4, pad_token_id=0)


def global_batch(num_rows: int, batch_size: int, seed: int, step: int) -> list[int]:
    return EpochOrder(num_rows, seed=seed).slice(step * batch_size, (step + 1) * batch_size)


def rows_of(batch: MicroBatch) -> list[int]:
    return [(int(first) - 1) // 4 for first in batch["input_ids"][:, 0]]


def loader(data: PackedDataset, **options: Any) -> StepLoader:
    given: dict[str, Any] = {"micro_batch_size": 1, "gradient_accumulation_steps": 1, "dp_rank": 0, "dp_size": 1}
    given |= {"seed": 0, "collate": Collator.of(data)} | options
    size = given["micro_batch_size"] * given["gradient_accumulation_steps"] * given["dp_size"]
    return StepLoader(data, **({"train_batch_size": size} | given))


@given(st.integers(1, 50), st.integers(1, 20), st.integers(0, 2**32), st.integers(1, 4))
def test_every_row_once_an_epoch(num_rows: int, batch_size: int, seed: int, epochs: int) -> None:
    steps = num_steps(num_rows, batch_size, epochs)
    stream = [row for step in range(steps) for row in global_batch(num_rows, batch_size, seed, step)]
    assert len(stream) == steps * batch_size >= epochs * num_rows
    for epoch in range(epochs):
        assert sorted(stream[epoch * num_rows : (epoch + 1) * num_rows]) == list(range(num_rows))


def test_epochs_and_seeds_differ_and_the_order_is_fixed_for_good() -> None:
    first, second = (global_batch(8, 8, 0, step) for step in (0, 1))
    assert first != second
    assert global_batch(8, 8, 1, 0) != first
    assert first == [3, 2, 1, 6, 0, 7, 4, 5]  # a change here breaks the resumption of every run there is


@settings(deadline=None, max_examples=40)
@given(st.sampled_from([1, 2, 3, 4, 6, 12]), st.sampled_from([1, 2, 3]), st.integers(12, 40), st.integers(0, 5))
def test_any_number_of_ranks_shares_the_same_global_batch(dp_size: int, micro: int, num_rows: int, start: int) -> None:
    batch_size = 72
    data = dataset(num_rows)
    options = {"micro_batch_size": micro, "gradient_accumulation_steps": batch_size // dp_size // micro}
    ranks = [
        list(loader(data, dp_rank=rank, dp_size=dp_size, start_step=start, num_steps=start + 2, **options))
        for rank in range(dp_size)
    ]
    for step in range(2):
        expected = global_batch(num_rows, batch_size, 0, start + step)
        assert [row for rank in ranks for batch in rank[step] for row in rows_of(batch)] == expected
    assert all(len(step) == options["gradient_accumulation_steps"] for rank in ranks for step in rank)


@pytest.mark.parametrize("packing", ["wrapped", "separated", "none"])
def test_resuming_gives_the_batches_of_the_run_that_was_not_stopped(packing: Any) -> None:
    data = dataset(11, packing)
    options = {"micro_batch_size": 2, "gradient_accumulation_steps": 2, "num_steps": 9}
    whole = list(loader(data, **options))
    resumed = list(loader(data, start_step=4, **options))
    assert (len(whole), len(resumed), len(loader(data, start_step=4, **options))) == (9, 5, 5)
    for expected, got in zip(whole[4:], resumed, strict=True):
        for left, right in zip(expected, got, strict=True):
            assert left.keys() == right.keys()
            assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_loader_can_be_read_twice() -> None:
    steps = loader(dataset(5), num_steps=3)
    assert [rows_of(step[0]) for step in steps] == [rows_of(step[0]) for step in steps]


def test_sizes_must_multiply() -> None:
    with pytest.raises(DataError, match="Set train_batch_size to 6") as caught:
        loader(dataset(8), train_batch_size=8, micro_batch_size=3, dp_size=2, num_steps=1)
    assert caught.value.codes == ("DATA_BATCH",)


@pytest.mark.parametrize(
    ("num_rows", "batch_size", "epochs", "steps"), [(10, 4, 1, 3), (10, 5, 3, 6), (30, 3, 0.1, 1), (7, 100, 0.5, 1)]
)
def test_num_steps(num_rows: int, batch_size: int, epochs: float, steps: int) -> None:
    assert num_steps(num_rows, batch_size, epochs) == steps


@given(st.integers(1, 23), st.integers(1, 3), st.integers(1, 4), st.sampled_from(["wrapped", "separated", "none"]))
@settings(deadline=None, max_examples=40)
def test_eval_sees_every_row_once_and_ranks_keep_step(num_rows: int, micro: int, dp_size: int, packing: Any) -> None:
    data = dataset(num_rows, packing)
    ranks = [
        EvalLoader(data, collate=Collator.of(data), micro_batch_size=micro, dp_rank=rank, dp_size=dp_size)
        for rank in range(dp_size)
    ]
    batches = [list(rank) for rank in ranks]
    assert {len(rank) for rank in ranks} == {len(rank) for rank in batches} == {-(-num_rows // (micro * dp_size))}
    seen = []
    for rank in batches:
        for batch in rank:
            assert len(batch["input_ids"]) == micro
            counts = (batch["labels"] != -100).any(dim=1)
            seen += [row for row, counted in zip(rows_of(batch), counts, strict=True) if counted]
    assert sorted(seen) == list(range(num_rows))


def fetching() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("toolkit-prefetch")]


def test_the_next_step_is_made_while_this_one_is_used() -> None:
    made: list[int] = []

    def collate(rows: Sequence[dict[str, np.ndarray]]) -> MicroBatch:
        made.append(threading.get_ident())
        return Collator.of(data)(rows)

    data = dataset(8)
    steps = iter(loader(data, collate=collate, num_steps=8))
    next(steps)
    deadline = time.monotonic() + 60
    while len(made) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert 2 <= len(made) <= 4
    assert threading.get_ident() not in made
    steps.close()  # type: ignore[attr-defined]
    assert fetching() == []


def test_leaving_early_ends_the_thread() -> None:
    for number, _ in enumerate(loader(dataset(8), num_steps=1000)):
        if number == 2:
            break
    deadline = time.monotonic() + 60
    while fetching() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert fetching() == []


def test_what_the_thread_raises_reaches_the_caller() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise DataError.of(code="DATA_TYPE", message="broken", fix="mend")

    stream = prefetch(items())
    assert next(stream) == 1
    with pytest.raises(DataError, match="broken"):
        next(stream)
    assert fetching() == []


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 400), st.integers(1, 6), st.integers(0, 5))
def test_grouped_by_length_an_epoch_has_every_row_and_a_step_similar_ones(rows: int, size: int, seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, 1000, rows)
    order = EpochOrder(rows, seed=seed, lengths=lengths, train_batch_size=size)
    stream = order.slice(0, 3 * rows)
    for epoch in range(3):
        assert sorted(stream[epoch * rows : (epoch + 1) * rows]) == list(range(rows))
    middle = rows + rows // 2  # a resume asks for later steps alone
    assert (
        EpochOrder(rows, seed=seed, lengths=lengths, train_batch_size=size).slice(middle, 2 * rows)
        == stream[middle : 2 * rows]
    )


def test_grouped_steps_differ_little_in_length_and_come_in_any_order() -> None:
    lengths = np.arange(200)
    steps = np.array(EpochOrder(200, seed=3, lengths=lengths, train_batch_size=4).slice(200, 400)).reshape(50, 4)
    assert (np.ptp(steps, axis=1) == 3).all()  # all 50 steps are one group
    assert not (np.diff(steps[:, 0]) < 0).all()
    padded = 40
    odd = np.array(EpochOrder(203, seed=3, lengths=np.arange(203), train_batch_size=4).slice(0, 4 * padded))
    assert np.median(np.ptp(odd.reshape(padded, 4), axis=1)) <= 5
