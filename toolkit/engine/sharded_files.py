"""Tensors of all ranks in safetensors files, through torch's distributed checkpoint, and the record beside them.

Each rank writes what it holds of each tensor, a tensor that all have is written by one. The files hold data alone: torch's own
format would add a pickled index, which may run code when it is read.

Source:
    torch distributed/checkpoint/hf_storage.py HuggingFaceStorageWriter, HuggingFaceStorageReader.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor
from torch.distributed.checkpoint._hf_utils import (
    CUSTOM_METADATA_KEY,
    DCP_VERSION_KEY,
    FORMAT_KEY,
    FORMAT_VALUE,
    HF_DCP_VERSION,
    SAVED_OFFSETS_KEY,
    _gen_file_name,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from toolkit.distributed.deepspeed_flats import LossScale
from toolkit.io import MAX_TEXT_BYTES, read_plain

ENGINE_FILE = "engine.json"

# What the names of tensors begin with: a weight's, those of its optimizer state (`optimizer.NAME.exp_avg`), and those of a
# communication hook (`hook.RANK.NAME.error`).
WEIGHT, OPTIMIZER, HOOK = "model.", "optimizer.", "hook."

# Writes a safetensors file of tensors and the texts of its header.
WriteTensors = Callable[[Path, Mapping[str, Tensor], Mapping[str, str]], None]


Averaged = dict[Literal["weight_sum", "lr_max"], float]  # of a group of weights


class EngineRecord(BaseModel):
    """What the tensors of an engine's files do not say.

    Args:
        scheduler_epoch: Optimizer steps that the learning-rate scheduler has done.
        optimizer_state: Names of the optimizer's tensors of each trained weight.
        dtype: Data type in which the model computes.
        shared: Further names of weights that modules share, each with the name that has the tensor.
        averages: What schedule-free AdamW has counted for each of its groups: the sum of what its weights count in their average, and
            the highest rate.
        skipped_steps: Steps that overflowed in fp16.
        loss_scale: State of the loss scaler, in fp16.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    scheduler_epoch: Annotated[int, Field(ge=0, lt=2**53)]
    optimizer_state: Annotated[tuple[Annotated[str, Field(max_length=64)], ...], Field(strict=False)]
    dtype: Literal["bf16", "fp16", "fp32"]
    shared: dict[str, str]
    averages: Annotated[tuple[Averaged, ...], Field(strict=False)] | None = None
    skipped_steps: Annotated[int, Field(ge=0, lt=2**53)] = 0
    loss_scale: LossScale | None = None

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the record in a folder of an engine's files.

        Raises:
            ValueError: It cannot be read.
        """
        try:
            return cls.model_validate_json(read_plain(folder, ENGINE_FILE, max_bytes=MAX_TEXT_BYTES))
        except (OSError, ValidationError) as error:
            raise ValueError(f"{ENGINE_FILE} cannot be read: {error!s:.200}") from None


class ShardReader(HuggingFaceStorageReader):
    """Reader that looks at the headers of the files once."""

    _found: Metadata | None = None

    def read_metadata(self) -> Metadata:
        if self._found is None:
            self._found = super().read_metadata()
        return self._found


class ShardWriter(HuggingFaceStorageWriter):
    """Writer whose files `write` makes: torch's own has all of a file's bytes in memory, and a second copy of them."""

    def __init__(self, folder: Path, write: WriteTensors) -> None:
        super().__init__(str(folder), save_distributed=True)
        self._write = write

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        written: Future[list[WriteResult]] = Future()
        parts: list[tuple[str, Any, Any]] = [
            (item.index.fqn, planner.resolve_data(item), item.tensor_data) for item in plan.items
        ]
        if parts:
            places = {name: {SAVED_OFFSETS_KEY: list(data.chunk.offsets)} for name, _, data in parts}
            header = {
                CUSTOM_METADATA_KEY: json.dumps(places),
                DCP_VERSION_KEY: str(HF_DCP_VERSION),
                FORMAT_KEY: FORMAT_VALUE,
            }
            name = _gen_file_name(1, 1, plan.storage_data["shard_index"])
            self._write(Path(self.path) / name, {name: tensor for name, tensor, _ in parts}, header)
        written.set_result([])  # of which `finish` makes nothing: each rank keeps its file
        return written


def save_tensors(folder: Path, tensors: Mapping[str, Tensor], *, write: WriteTensors) -> None:
    """Write tensors, of which each rank may hold a part, into `folder`, each rank one file by `write`.

    Collectives:
        Those of torch's distributed checkpoint.
    """
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    try:
        with _quiet():
            save(dict(tensors), storage_writer=ShardWriter(folder, write))
    except CheckpointException as error:
        raise _first_failure(error) from error


def load_tensors(
    folder: Path, tensors: Mapping[str, Tensor], *, reader: ShardReader | None = None, alone: bool = False
) -> None:
    """Read tensors in place, each rank its part; without process groups, whole ones.

    Args:
        folder: Folder of the files.
        tensors: Tensors by name.
        reader: Reader that has seen the files' headers.
        alone: Whether this rank reads whole tensors without the others.

    Raises:
        ValueError: The files lack one of them, or have it in another shape.
    """
    reader = reader or ShardReader(str(folder))
    known = reader.read_metadata().state_dict_metadata
    for name, tensor in tensors.items():
        size = getattr(known.get(name), "size", None)
        if size is None:
            raise ValueError(f"has no {name}")
        if tuple(size) != tuple(tensor.shape):
            raise ValueError(f"has {name} of shape {tuple(size)}, the model of shape {tuple(tensor.shape)}")
    try:
        with _quiet():
            load(dict(tensors), storage_reader=reader, no_dist=alone or not dist.is_initialized())
    except CheckpointException as error:
        raise _first_failure(error) from error


def _first_failure(error: CheckpointException) -> Exception:
    """Return the first rank's failure, so that a full disk is told as one."""
    for failure, _ in error.failures.values():
        if isinstance(failure, Exception):
            return failure
    return RuntimeError(str(error))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's warning that a single process reads without process groups."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield
