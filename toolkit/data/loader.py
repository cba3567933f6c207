"""Which rows each optimizer step takes, by arithmetic alone, and the loaders that fetch them.

The order depends on the seed and the number of rows, not on the number of ranks: 8 GPUs and 4 see the same rows
in a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import TypeVar, cast

import numpy as np
import torch

from toolkit.data.collate import MicroBatch
from toolkit.data.labelled import LabelledDataset, ignored
from toolkit.data.packing import PackedDataset
from toolkit.data.sources import shuffled
from toolkit.errors import DataError

StepBatch = list[MicroBatch]
Collate = Callable[[Sequence[dict[str, np.ndarray]]], MicroBatch]
_Item = TypeVar("_Item")
# Steps whose rows are sorted by length together, as many as in transformers (trainer_pt_utils.py get_length_grouped_indices):
# enough to make them similar, few enough to keep the order random.
GROUP_STEPS = 50
_END = object()  # what follows the last item


def num_steps(num_sequences: int, train_batch_size: int, epochs: float) -> int:
    """Return the number of optimizer steps of some epochs; the last one is filled up from the next epoch.

    >>> num_steps(10, 4, 1), num_steps(10, 4, 2), num_steps(30, 3, 0.1)
    (3, 5, 1)
    """
    return math.ceil(Fraction(str(epochs)) * num_sequences / train_batch_size)


class EpochOrder:
    """The endless stream of rows, one permutation per epoch; caches the permutation that it last used.

    Step s of a run takes positions [s * train_batch_size, (s + 1) * train_batch_size).

    Args:
        num_sequences: Number of rows.
        seed: Seed of the order.
        lengths: Tokens of each row if steps take rows of similar length; None for any.
        train_batch_size: Rows of a step, with `lengths`.
    """

    def __init__(
        self, num_sequences: int, *, seed: int, lengths: np.ndarray | None = None, train_batch_size: int = 1
    ) -> None:
        self._num_sequences = num_sequences
        self._seed = seed
        self._lengths = lengths
        self._train_batch_size = train_batch_size
        self._epoch = -1
        self._permutation = np.empty(0, np.int64)

    def slice(self, start: int, stop: int) -> list[int]:
        """Return the rows at positions [start, stop) of the stream."""
        rows: list[int] = []
        while start < stop:
            epoch, within = divmod(start, self._num_sequences)
            if epoch != self._epoch:
                self._permutation, self._epoch = self._order(epoch), epoch
            taken = self._permutation[within : within + stop - start].tolist()
            rows += taken
            start += len(taken)
        return rows

    def _order(self, epoch: int) -> np.ndarray:
        order = shuffled(self._num_sequences, seed=self._seed, stream=epoch)
        if self._lengths is None:
            return order
        # Rows that complete the step which began in the last epoch, whole steps in groups, and rows that begin the next.
        size, begin = self._train_batch_size, -epoch * self._num_sequences % self._train_batch_size
        end = begin + max(len(order) - begin, 0) // size * size
        parts = [order[:begin]]
        for at in range(begin, end, GROUP_STEPS * size):
            rows = order[at : min(at + GROUP_STEPS * size, end)]
            steps = rows[np.argsort(-self._lengths[rows], kind="stable")].reshape(-1, size)
            parts.append(steps[shuffled(len(steps), seed=self._seed, stream=epoch)].ravel())
        return np.concatenate([*parts, order[max(end, begin) :]])


class StepLoader:
    """Iterates over optimizer steps; each item holds this rank's micro-batches, one fetched ahead by a thread.

    Args:
        dataset: Data set of packed rows.
        collate: Turns rows into tensors.
        train_batch_size: Rows per step over all ranks.
        micro_batch_size: Rows per forward pass.
        gradient_accumulation_steps: Micro-batches per step and rank.
        dp_rank: Data-parallel rank.
        dp_size: Number of data-parallel ranks.
        seed: Seed of the order.
        start_step: First step to yield: the number of completed steps.
        num_steps: Steps of the whole run, those before start_step included.
        group_by_length: Whether the rows of a step have similar length.
    Raises:
        DataError: DATA_BATCH, if the sizes do not multiply to train_batch_size.
    """

    def __init__(
        self,
        dataset: PackedDataset | LabelledDataset,
        *,
        collate: Collate,
        train_batch_size: int,
        micro_batch_size: int,
        gradient_accumulation_steps: int,
        dp_rank: int,
        dp_size: int,
        seed: int,
        num_steps: int,
        start_step: int = 0,
        group_by_length: bool = False,
    ) -> None:
        product = micro_batch_size * gradient_accumulation_steps * dp_size
        if product != train_batch_size:
            message = (
                f"train_batch_size={train_batch_size} is not micro_batch_size={micro_batch_size} ×"
                f" gradient_accumulation_steps={gradient_accumulation_steps} × dp_size={dp_size} = {product}"
            )
            fix = f"Set train_batch_size to {product}"
            raise DataError.of(code="DATA_BATCH", key="train.train_batch_size", message=message, fix=fix)
        self.dataset = dataset
        self._collate = collate
        self._train_batch_size = train_batch_size
        self._micro_batch_size = micro_batch_size
        self._dp_rank = dp_rank
        self._per_rank = train_batch_size // dp_size
        self._seed = seed
        self._steps = range(start_step, num_steps)
        self._lengths = dataset.row_tokens if group_by_length else None

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[StepBatch]:
        return prefetch(self._batches())

    def _batches(self) -> Iterator[StepBatch]:
        size = self._train_batch_size
        order = EpochOrder(len(self.dataset), seed=self._seed, lengths=self._lengths, train_batch_size=size)
        for step in self._steps:
            start = step * self._train_batch_size + self._dp_rank * self._per_rank
            mine = order.slice(start, start + self._per_rank)
            yield [
                pinned(self._collate([self.dataset[row] for row in mine[at : at + self._micro_batch_size]]))
                for at in range(0, self._per_rank, self._micro_batch_size)
            ]


class EvalLoader:
    """Iterates in order over micro-batches of all rows, each of which is on exactly one rank.

    All ranks get the same number of micro-batches of the same number of rows, so that their collectives match; missing
    rows at the end are filled with a row whose labels do not count.

    Args:
        dataset: Data set of at least one packed row.
        collate: Turns rows into tensors.
        micro_batch_size: Rows per forward pass.
        dp_rank: Data-parallel rank.
        dp_size: Number of data-parallel ranks.
    """

    def __init__(
        self,
        dataset: PackedDataset | LabelledDataset,
        *,
        collate: Collate,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
    ) -> None:
        self._dataset = dataset
        self._collate = collate
        self._micro_batch_size = micro_batch_size
        self._dp_rank = dp_rank
        self._stride = micro_batch_size * dp_size

    def __len__(self) -> int:
        return -(-len(self._dataset) // self._stride)

    def __iter__(self) -> Iterator[MicroBatch]:
        return prefetch(self._batches())

    def _batches(self) -> Iterator[MicroBatch]:
        for number in range(len(self)):
            start = number * self._stride + self._dp_rank * self._micro_batch_size
            rows = [self._row(index) for index in range(start, start + self._micro_batch_size)]
            yield pinned(self._collate(rows))

    def _row(self, index: int) -> dict[str, np.ndarray]:
        if index < len(self._dataset):
            return self._dataset[index]
        row = self._dataset[0]
        return {**row, "labels": ignored(row["labels"])}


def prefetch(items: Iterator[_Item]) -> Iterator[_Item]:
    """Compute the next item in a thread while the last one is in use.

    Exceptions of the thread are raised here. Closing or dropping the iterator early ends the thread.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="toolkit-prefetch") as thread:
        ahead = thread.submit(next, items, _END)
        while (item := ahead.result()) is not _END:
            ahead = thread.submit(next, items, _END)
            yield cast(_Item, item)


def pinned(batch: MicroBatch) -> MicroBatch:
    """Return a batch in pinned host memory, so that its copy to the GPU can overlap with computation."""
    return {name: tensor.pin_memory() for name, tensor in batch.items()} if torch.cuda.is_available() else batch
