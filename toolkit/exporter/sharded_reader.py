"""Reading of single tensors from the files of DDP and FSDP2, which torch's distributed checkpoint wrote on any number of ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from toolkit.engine.sharded_files import WEIGHT, EngineRecord, ShardReader, load_tensors
from toolkit.errors import CheckpointError, Problem
from toolkit.exporter.zero_reader import StoredTensor
from toolkit.modeling.architecture import DTYPES


@dataclass(slots=True)
class ShardedCheckpoint:
    """The whole tensors of a model in one tag's folder, each joined from the ranks' parts when it is read.

    Args:
        folder: Folder of the tag.

    Raises:
        CheckpointError: EXPORT_DAMAGED.
    """

    folder: Path
    tensors: dict[str, StoredTensor] = field(init=False)
    _reader: ShardReader = field(init=False)

    def __post_init__(self) -> None:
        try:
            record = EngineRecord.read(self.folder)
            self._reader = ShardReader(str(self.folder))
            found = self._reader.read_metadata().state_dict_metadata
        except (ValueError, LookupError, OSError, TypeError, SafetensorError) as error:
            raise CheckpointError(_damaged(self.folder, f"cannot be read: {error!r:.200}")) from error
        sizes = {
            name.removeprefix(WEIGHT): (tuple(held.size), held.properties.dtype)  # type: ignore[union-attr]
            for name, held in found.items()
            if name.startswith(WEIGHT)
        }
        owners = {name: name for name in sizes} | {
            name: owner for name, owner in record.shared.items() if owner in sizes
        }
        self.tensors = {
            name: StoredTensor(
                shape=sizes[owner][0],
                # FSDP2 keeps in fp32 what the model has in training precision.
                dtype=DTYPES[record.dtype] if sizes[owner][1].is_floating_point else sizes[owner][1],
                owner=owner,
            )
            for name, owner in owners.items()
        }

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return one whole tensor, in `dtype` if it is a floating-point one.

        Raises:
            CheckpointError: EXPORT_DAMAGED, if its parts cannot be read.
        """
        stored = self.tensors[name]
        key = f"{WEIGHT}{stored.owner}"
        held = self._reader.read_metadata().state_dict_metadata[key].properties.dtype  # type: ignore[union-attr]
        whole = torch.empty(stored.shape, dtype=held)
        try:
            load_tensors(self.folder, {key: whole}, reader=self._reader, alone=True)
        except (ValueError, LookupError, OSError, RuntimeError, SafetensorError) as error:
            raise CheckpointError(_damaged(self.folder, f"has no values of {name}: {error!r:.200}")) from error
        return whole.to(dtype) if whole.is_floating_point() else whole


def _damaged(path: Path, what: str) -> Problem:
    return Problem(code="EXPORT_DAMAGED", key=str(path), message=f"{path} {what}", fix="Export an earlier checkpoint")
