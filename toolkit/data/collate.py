"""Collation of rows of a packed data set into the tensors of one micro-batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn import functional

from toolkit.config.job import Packing
from toolkit.data.images import read_image
from toolkit.data.packing import ROUND_TO
from toolkit.data.processor import Processor
from toolkit.dataset_inspection.image_sources import image_error
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

    @staticmethod
    def of(dataset: Packed, *, flatten: bool = False, num_slices: int = 1) -> Collator:
        """Return the collator for a data set's rows."""
        processor = getattr(dataset, "processor", None)
        if processor is not None:
            return ImageCollator(
                packing=dataset.packing,
                sequence_length=dataset.sequence_length,
                pad_token_id=dataset.pad_token_id,
                processor=processor,
            )
        return Collator(
            packing=dataset.packing,
            sequence_length=dataset.sequence_length,
            pad_token_id=dataset.pad_token_id,
            per_token=dataset.per_token,
            flatten=flatten,
            num_slices=num_slices,
        )

    def __call__(self, rows: Sequence[dict[str, Any]]) -> MicroBatch:
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
        for name in fills:
            if name not in rows[0]:
                continue
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageCollator(Collator):
    """Stacks rows of a model that reads images, and adds the tensors of their images, in order, as its processor makes them.

    A micro-batch without an image gets a blank one, whose tokens come after its shortest row and are neither attended to nor in the loss: the
    modules for images then run on every rank of each step, as collectives of gradients and of ZeRO-3's weights need.

    Args:
        processor: The model's processor.
    """

    processor: Processor

    def __call__(self, rows: Sequence[dict[str, Any]]) -> MicroBatch:
        """Collate one or more rows.

        Raises:
            DataError: DATA_IMAGE if an image cannot be read any more, or has another size than when its tokens were counted.
        """
        batch = Collator.__call__(self, rows)
        images = [image for row in rows for image in _read(row["images"])]
        if not images:
            images = [self.processor.blank()]
            batch = self._with_blank(batch, [len(row["input_ids"]) for row in rows], images[0].size)
        if self.processor.mark is not None:
            batch[self.processor.mark] = self.processor.marks(batch["input_ids"])
        return batch | self.processor.tensors(images)

    def _with_blank(self, batch: MicroBatch, lengths: Sequence[int], size: tuple[int, int]) -> MicroBatch:
        """Return a batch with the tokens of a blank image after its shortest row."""
        count = self.processor.tokens_of(size)
        [token] = self.processor.image_tokens
        at = lengths.index(min(lengths))
        width = batch["input_ids"].shape[1]
        more = max(0, -(-(lengths[at] + count) // ROUND_TO) * ROUND_TO - width)
        fill = {"input_ids": self.pad_token_id, "labels": IGNORED, "attention_mask": 0}
        wide = {name: functional.pad(batch[name], (0, more), value=value) for name, value in fill.items()}
        wide["input_ids"][at, lengths[at] : lengths[at] + count] = token
        return wide


def _read(given: Mapping[str, Any]) -> list[Any]:
    """Return the images of a row, each of the size that it had when its tokens were counted."""
    found = []
    where = f"record {given['record'] + 1} of the prepared data"
    for source, size in zip(given["images"], given["image_sizes"], strict=True):
        try:
            image = read_image(source)
        except ValueError as error:
            raise image_error(str(error), where=where, key="data") from None
        if list(image.size) != size:
            reason = f"image {source['path']} has {image.size} pixels, and had {tuple(size)} when the data was prepared"
            raise image_error(reason, where=where, key="data")
        found.append(image)
    return found
