"""The safetensors files of a saved model: the list of tensors, and their values on demand."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from toolkit.errors import CheckpointError, Problem
from toolkit.io import read_json_object

_MEAN_ROWS = 4096  # rows of an embedding that are summed at once
_SHOWN = 8  # number of keys that a message names before it counts the rest
DTYPES = {  # safetensors' names, README "Format"
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


class SafetensorsFolder:
    """The tensors of a saved model by key, read on demand.

    Args:
        folder: Folder with `model.safetensors`, or else shards and their index.
        stem: Stem of the file name: `model`, or `adapter_model` for adapters saved by peft.
    Raises:
        CheckpointError: WEIGHTS_BIN, WEIGHTS_ABSENT, WEIGHTS_CORRUPT.
    """

    def __init__(self, folder: Path, *, stem: str = "model") -> None:
        self.folder = folder
        self._file_of: dict[str, Any] = {}
        self.metas: dict[str, Tensor] = {}
        self._grown: dict[str, int] = {}
        index, single = folder / f"{stem}.safetensors.index.json", folder / f"{stem}.safetensors"
        expected: dict[str, str] = {}
        if not single.is_file():  # which transformers prefers to an index
            if not index.is_file():
                raise CheckpointError(_no_weights(folder))
            expected = _read_index(index)
        for name in sorted(set(expected.values())) or [single.name]:
            self._open(folder / name)
        lost = sorted(expected.keys() - self._file_of.keys())
        if lost:
            raise CheckpointError(corrupt(index, f"names {some(lost)}, which its shards do not have"))

    def read(self, key: str) -> Tensor:
        """Return one tensor, memory-mapped from its file; its pages are read on access."""
        tensor: Tensor = self._file_of[key].get_tensor(key)
        if key not in self._grown:
            return tensor
        return torch.cat([tensor, self._new_rows(key, self.metas[key].shape[0] - self._grown[key])])

    def grow(self, key: str, num_rows: int) -> None:
        """Give a tensor more rows than its file has: each is the mean of those there.

        Source:
            transformers modeling_utils.py _init_added_embeddings_weights_with_mean, whose noise around it is 1e-9 of the covariance.
        """
        old = self.metas[key]
        self._grown[key] = old.shape[0]
        self.metas[key] = torch.empty((num_rows, *old.shape[1:]), dtype=old.dtype, device="meta")

    def _new_rows(self, key: str, count: int) -> Tensor:
        view = self._file_of[key].get_slice(key)
        rows = self._grown[key]
        total = torch.zeros(self.metas[key].shape[1:], dtype=torch.float64)
        for start in range(0, rows if count else 0, _MEAN_ROWS):
            total += view[start : start + _MEAN_ROWS].float().sum(0)
        return (total / rows).to(self.metas[key].dtype).expand(count, *total.shape)

    def read_ranges(self, key: str, *, dim: int, ranges: Sequence[range]) -> Tensor:
        """Read some ranges of one tensor along a dim, concatenated in their order, and no other bytes of it."""
        if key in self._grown:
            if dim:
                whole = self.read(key)
                return torch.cat([whole.narrow(dim, each.start, len(each)) for each in ranges], dim)
            rows = self._grown[key]
            within = [range(min(each.start, rows), min(each.stop, rows)) for each in ranges]
            beyond = sum(map(len, ranges)) - sum(map(len, within))
            return torch.cat([self._old_ranges(key, dim=0, ranges=within), self._new_rows(key, beyond)])
        return self._old_ranges(key, dim=dim, ranges=ranges)

    def _old_ranges(self, key: str, *, dim: int, ranges: Sequence[range]) -> Tensor:
        view = self._file_of[key].get_slice(key)
        before = (slice(None),) * dim
        pieces = [view[(*before, slice(each.start, each.stop))] for each in ranges if len(each)]
        if not pieces:
            shape = list(view.get_shape())
            shape[dim] = 0
            return torch.empty(shape, dtype=self.metas[key].dtype)
        return torch.cat(pieces, dim) if len(pieces) > 1 else pieces[0]

    def _open(self, path: Path) -> None:
        try:
            file: Any = safe_open(path, framework="pt", device="cpu")
            for key in file.keys():  # noqa: SIM118 -- not a mapping
                view = file.get_slice(key)
                dtype = DTYPES.get(view.get_dtype())
                if dtype is None:
                    raise CheckpointError(corrupt(path, f"has {key} in the unknown dtype {view.get_dtype()}"))
                self.metas[key] = torch.empty(view.get_shape(), dtype=dtype, device="meta")
                self._file_of[key] = file
        except (SafetensorError, OSError, struct.error) as error:
            raise CheckpointError(corrupt(path, f"cannot be read: {error}")) from error


def _no_weights(folder: Path) -> Problem:
    pickles = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
    if pickles:
        return Problem(
            code="WEIGHTS_BIN",
            key=str(folder),
            message=f"{folder} has {some(pickles)} and no safetensors: pickles can run code and cannot be streamed",
            fix="Convert it once: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER), then name "
            "NEW_FOLDER in model.name",
        )
    return Problem(
        code="WEIGHTS_ABSENT",
        key=str(folder),
        message=f"{folder} has neither model.safetensors nor model.safetensors.index.json",
        fix="Name a folder that save_pretrained wrote, or set model.init: random",
    )


def corrupt(path: Path, what: str) -> Problem:
    """Return the problem WEIGHTS_CORRUPT of a file that cannot be used."""
    return Problem(
        code="WEIGHTS_CORRUPT", key=str(path), message=f"{path} {what}", fix="Download or export the checkpoint again"
    )


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = read_json_object(path)["weight_map"]
        return {str(key): str(name) for key, name in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise CheckpointError(corrupt(path, f"is not an index of shards: {error!r}")) from error


def some(keys: Sequence[str]) -> str:
    """Return the first few of many keys, for a message."""
    rest = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return ", ".join(keys[:_SHOWN]) + rest
