"""The stages of a pipeline's checkpoint as one: each tensor is read from the stage that has it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from toolkit.errors import CheckpointError, Problem
from toolkit.exporter.adapter import Weights, read_part
from toolkit.exporter.zero_reader import StoredTensor
from toolkit.modeling.safetensors_folder import some


@dataclass(slots=True)
class UnitedCheckpoint:
    """The tensors of all stages under their names in the whole model, which every stage uses.

    The last stage has its own copy of a tied weight, trained like the first stage's. It counts as the same tensor.

    Args:
        folder: Checkpoint folder, for messages.
        stages: Stages in order; a single one without a pipeline.
        tied: Name of a tied weight to the name of the one whose values it shares.
    Raises:
        CheckpointError: EXPORT_DAMAGED if stages have different values of one tensor.
    """

    folder: Path
    stages: Sequence[Weights]
    tied: Mapping[str, str]
    tensors: dict[str, StoredTensor] = field(init=False)
    _stage_of: dict[str, Weights] = field(init=False)

    def __post_init__(self) -> None:
        self._stage_of = {}
        for stage, weights in enumerate(self.stages):
            unlike = sorted(self._unlike(weights))
            if unlike:
                raise CheckpointError(_other_values(self.folder, stage, unlike))
            self._stage_of |= {name: weights for name in weights.tensors if name not in self._stage_of}
        self.tensors = {name: self._described(name) for name in self._stage_of}

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return one whole tensor, in `dtype` if it is a floating-point one."""
        return self._stage_of[name].read(name, dtype)

    def read_part(self, name: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Return elements [start, stop) of a tensor, row by row."""
        return read_part(self._stage_of[name], name, start, stop, dtype)

    def _unlike(self, weights: Weights) -> Iterator[str]:
        """Yield tensors whose values differ from an earlier stage's: stages share only buffers outside the layers."""
        for name in weights.tensors.keys() & self._stage_of.keys():
            earlier = self._stage_of[name]
            own, other = weights.tensors[name], earlier.tensors[name]
            is_same = (own.shape, own.dtype) == (other.shape, other.dtype)
            if not is_same or not torch.equal(weights.read(name, own.dtype), earlier.read(name, own.dtype)):
                yield name

    def _described(self, name: str) -> StoredTensor:
        holder, kept = self._stage_of[name], self.tied.get(name)
        stored = holder.tensors[name]
        if kept is None or self._stage_of[kept] is holder:  # a weight tied within its stage records that itself
            return stored
        return replace(stored, owner=self._stage_of[kept].tensors[kept].owner)


def _other_values(folder: Path, stage: int, names: list[str]) -> Problem:
    return Problem(
        code="EXPORT_DAMAGED",
        key=str(folder),
        message=f"the files of stage {stage} in {folder} have {some(names)} with other values than an earlier stage: "
        "they belong to different runs",
        fix="Copy the files of every rank from the same run, or export an earlier checkpoint",
    )
