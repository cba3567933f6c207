"""The frozen weights of a LoRA run, which its checkpoints leave out, read from where training read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from toolkit.errors import CheckpointError, raise_all
from toolkit.export.adapter import Weights
from toolkit.export.zero_reader import StoredTensor
from toolkit.modeling.conversion import ConversionGroup, convert_group
from toolkit.modeling.safetensors_folder import SafetensorsFolder
from toolkit.modeling.weights import full_shapes, schedule_loading


@dataclass(slots=True)
class WithBase:
    """A checkpoint's tensors, and those of the base model that it lacks, under the names of a `peft.PeftModel`.

    Args:
        weights: The checkpoint.
        folder: Safetensors of the base model.
        model: The base model on the meta device.
    Raises:
        CheckpointError: The folder does not fit the model.
    """

    weights: Weights
    folder: Path
    model: PreTrainedModel
    tensors: dict[str, StoredTensor] = field(init=False)
    _files: SafetensorsFolder = field(init=False)
    _targets: dict[str, Tensor] = field(init=False)
    _group_of: dict[str, ConversionGroup] = field(init=False)

    def __post_init__(self) -> None:
        self._files = SafetensorsFolder(self.folder)
        self._targets = full_shapes(self.model)
        schedule = schedule_loading(self.model, self._files.metas)
        raise_all(CheckpointError, schedule.problems)
        self._group_of = {key: group for batch in schedule.batches for group, keys in batch for key in keys}
        dtype = next((held.dtype for held in self.weights.tensors.values()), torch.float32)
        base = {
            key: StoredTensor(shape=tuple(self._targets[key].shape), dtype=dtype, owner=key) for key in self._group_of
        }
        known = {_plain(name) for name in self.weights.tensors}
        self.tensors = dict(self.weights.tensors) | {key: held for key, held in base.items() if key not in known}

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """One whole tensor, in `dtype` if it is a floating-point one."""
        if name in self.weights.tensors:
            return self.weights.read(name, dtype)
        group = self._group_of[name]
        read: Mapping[str, Tensor] = {key: self._files.read(key) for key in group.keys}
        value = convert_group(self.model, group, read, self._targets)[name]
        return value.to(dtype) if value.is_floating_point() else value


def _plain(name: str) -> str:
    """Gives the base model's name of a tensor of a `peft.PeftModel`."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".").replace(".modules_to_save.default.", ".")
