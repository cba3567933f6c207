"""Collation of rows of a packed data set into the tensors of one micro-batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from toolkit.config.job import Packing
from toolkit.data.packing import ROUND_TO
from toolkit.modeling.loss import IGNORED

MicroBatch = dict[str, torch.Tensor]


class Packed(Protocol):
    """What is known of rows before they are read."""

    @property
    def packing(self) -> Packing: ...

    @property
    def sequence_length(self) -> int: ...

    @property
    def pad_token_id(self) -> int: ...

    @property
    def per_token(self) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Collator:
    """Stacks rows into int64 tensors of shape (batch, sequence).

    `wrapped`: input_ids and labels. `separated`: also position_ids, which restart at each document; from them the
    model derives a block-diagonal mask, if given no attention_mask and no cache. `none`: also attention_mask; rows are
    padded to the longest, in multiples of 8 and of `num_slices`, at most sequence_length. Labels of whole rows are stacked as they are.

    Args:
        packing: Packing of the rows.
        sequence_length: Tokens of a full row.
        pad_token_id: Token that fills a row.
        per_token: Whether labels are those of tokens.
        flatten: Whether to concatenate `separated` rows, shape (1, batch * sequence): flash attention derives documents
            from position_ids only in a batch of one.
        num_slices: Number of ranks that share each row.

    Source:
        transformers, masking_utils.find_packed_sequence_indices; modeling_flash_attention_utils._is_packed_sequence.
    """

    packing: Packing
    sequence_length: int
    pad_token_id: int
    per_token: bool = True
    flatten: bool = False
    num_slices: int = 1

    @classmethod
    def of(cls, dataset: Packed, *, flatten: bool = False, num_slices: int = 1) -> Collator:
        """Return the collator for a data set's rows."""
        return cls(
            packing=dataset.packing,
            sequence_length=dataset.sequence_length,
            pad_token_id=dataset.pad_token_id,
            per_token=dataset.per_token,
            flatten=flatten,
            num_slices=num_slices,
        )

    def __call__(self, rows: Sequence[dict[str, np.ndarray]]) -> MicroBatch:
        """Collate one or more rows."""
        if self.packing != "none":
            batch = {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]}
            if self.flatten and self.packing == "separated":
                return {name: tensor.reshape(1, -1) for name, tensor in batch.items()}
            return batch
        longest = max(len(row["input_ids"]) for row in rows)
        multiple = math.lcm(ROUND_TO, self.num_slices)
        shape = (len(rows), min(self.sequence_length, -(-longest // multiple) * multiple))
        fills = {"input_ids": self.pad_token_id, "labels": IGNORED, "token_type_ids": 0}
        arrays = {}
        for name in rows[0]:
            if name == "labels" and not self.per_token:
                arrays[name] = np.stack([row[name] for row in rows])
                continue
            arrays[name] = np.full(shape, fills[name], np.int64)
            for at, row in enumerate(rows):
                arrays[name][at, : len(row[name])] = row[name]
        arrays["attention_mask"] = np.zeros(shape, np.int64)
        for at, row in enumerate(rows):
            arrays["attention_mask"][at, : len(row["input_ids"])] = 1
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
