"""What the files of DDP and FSDP2, and those that `toolkit checkpoint convert` writes, have saved for each weight."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from toolkit.engine.sharded_files import OPTIMIZER, WEIGHT, EngineRecord, ShardReader, load_tensors
from toolkit.errors import CheckpointError
from toolkit.exporter.zero_reader import StoredTensor, damaged_tag
from toolkit.reshape.zero_states import MASTER, STEP


@dataclass(frozen=True, slots=True)
class PartOfFiles:
    """One kind of number of each trained weight; whole tensors of the weights' shapes.

    Args:
        folder: Folder of the tag.
        reader: Reader of its files.
        tensors: The tensors; the owner of each is its name in the files.
    """

    folder: Path
    reader: ShardReader
    tensors: Mapping[str, StoredTensor]

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return one whole tensor.

        Raises:
            CheckpointError: EXPORT_DAMAGED, if its parts cannot be read.
        """
        stored = self.tensors[name]
        whole = torch.empty(stored.shape, dtype=stored.dtype)
        try:
            load_tensors(self.folder, {stored.owner: whole}, reader=self.reader, alone=True)
        except (ValueError, LookupError, OSError, RuntimeError, SafetensorError) as error:
            raise CheckpointError(damaged_tag(self.folder, f"has no values of {name}: {error!r:.200}")) from error
        return whole.to(dtype)

    def read_part(self, name: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Return elements [start, stop) of a tensor, row by row, and read of the files the rows that have them.

        Raises:
            CheckpointError: As `read`.
        """
        stored = self.tensors[name]
        width = math.prod(stored.shape[1:])
        if not stored.shape or not width or start >= stop:
            return self.read(name, dtype).reshape(-1)[start:stop]
        first, last = start // width, -(-stop // width)
        rows = torch.empty((last - first, *stored.shape[1:]), dtype=stored.dtype)
        found = 0
        try:
            held: Any = self.reader.read_metadata()
            for chunk in held.state_dict_metadata[stored.owner].chunks:
                low, high = max(first, chunk.offsets[0]), min(last, chunk.offsets[0] + chunk.sizes[0])
                if low >= high:
                    continue
                place = held.storage_data[MetadataIndex(stored.owner, chunk.offsets)]
                with safe_open(place.relative_path, framework="pt") as file:
                    values = file.get_slice(stored.owner)[low - chunk.offsets[0] : high - chunk.offsets[0]]
                target = rows.narrow(0, low - first, high - low)
                for dim in range(1, len(stored.shape)):
                    target = target.narrow(dim, chunk.offsets[dim], chunk.sizes[dim])
                target.copy_(values)
                found += values.numel()
        except (ValueError, LookupError, OSError, RuntimeError, SafetensorError) as error:
            raise CheckpointError(damaged_tag(self.folder, f"has no values of {name}: {error!r:.200}")) from error
        if found != rows.numel():
            raise CheckpointError(damaged_tag(self.folder, f"has {found} of {rows.numel()} values of rows of {name}"))
        return rows.view(-1)[start - first * width : stop - first * width].to(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedStates:
    """All that an optimizer has saved for the weights.

    Args:
        record: The engine's record beside the tensors.
        parts: Numbers of the weights' shapes, by kind: `master`, and each state of the optimizer.
        steps: Steps that the optimizer has done on each weight.
    """

    record: EngineRecord
    parts: Mapping[str, PartOfFiles]
    steps: Mapping[str, int]


def sharded_states(folder: Path) -> ShardedStates:
    """Return what a tag's files have.

    Raises:
        CheckpointError: EXPORT_DAMAGED.
    """
    try:
        record, reader = EngineRecord.read(folder), ShardReader(str(folder))
        saved: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
    except (ValueError, LookupError, OSError, TypeError, SafetensorError) as error:
        raise CheckpointError(damaged_tag(folder, f"cannot be read: {error!r:.200}")) from error

    def stored(key: str) -> StoredTensor:
        return StoredTensor(shape=tuple(saved[key].size), dtype=saved[key].properties.dtype, owner=key)

    found: dict[str, dict[str, StoredTensor]] = {MASTER: {}}
    counts: dict[str, Tensor] = {}
    for key in saved:
        name, _, kind = key.removeprefix(OPTIMIZER).rpartition(".")
        if not key.startswith(OPTIMIZER):
            continue
        if kind == STEP:
            counts[key] = torch.zeros(tuple(saved[key].size))
        else:
            found.setdefault(kind, {})[name] = stored(key)
        found[MASTER].setdefault(name, stored(f"{WEIGHT}{name}"))
    try:
        load_tensors(folder, counts, reader=reader, alone=True)
    except (ValueError, LookupError, OSError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(damaged_tag(folder, f"has no counts of steps: {error!r:.200}")) from error
    return ShardedStates(
        record=record,
        parts={kind: PartOfFiles(folder, reader, tensors) for kind, tensors in found.items()},
        steps={key.removeprefix(OPTIMIZER).removesuffix(f".{STEP}"): int(count.max()) for key, count in counts.items()},
    )
