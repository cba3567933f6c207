"""Frozen base weights of a LoRA run, by model key: its checkpoints leave them out, since they never change."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from toolkit.catalog.tasks import default_task
from toolkit.config.job import CLASSIFYING
from toolkit.errors import CheckpointError, raise_all
from toolkit.exporter.zero_reader import StoredTensor
from toolkit.modeling.conversion import ConversionGroup, convert_group
from toolkit.modeling.nf4 import rounded_to_nf4
from toolkit.modeling.safetensors_folder import SafetensorsFolder
from toolkit.modeling.weights import full_shapes, grow_embeddings, plan_loading


@dataclass(slots=True)
class PretrainedWeights:
    """Whole tensors of a folder of safetensors, as the model has them: experts stacked, tied keys resolved.

    Args:
        folder: Local folder with `model.safetensors` or several files and their index.
        model: The model on the meta device, its weights tied as the config says.
        dtype: Training dtype of the floating-point tensors.
        packed: Keys of the weights that training held in NF4, which are rounded to it.
    Raises:
        CheckpointError: WEIGHTS_*, if the folder does not fit the model.
    """

    folder: Path
    model: PreTrainedModel
    dtype: torch.dtype
    packed: frozenset[str] = frozenset()
    tensors: dict[str, StoredTensor] = field(init=False)
    _files: SafetensorsFolder = field(init=False)
    _shapes: dict[str, Tensor] = field(init=False)
    _group_of: dict[str, ConversionGroup] = field(init=False)

    def __post_init__(self) -> None:
        self._files = SafetensorsFolder(self.folder)
        self._shapes = full_shapes(self.model)
        grow_embeddings(self._files, self.model, self._shapes)  # as the run has, whose configuration the model has
        classifies = default_task(self.model.config.to_dict())[0] in CLASSIFYING  # its head is the adapter's
        schedule = plan_loading(self.model, self._files.metas, new_head=classifies)
        raise_all(CheckpointError, schedule.problems)
        self._group_of = {key: group for batch in schedule.batches for group, keys in batch for key in keys}
        state = self.model.state_dict(keep_vars=True)
        stored = {id(state[key]): key for key in self._group_of}
        self.tensors = {
            key: StoredTensor(
                shape=tuple(shape.shape),
                dtype=self.dtype if shape.is_floating_point() else shape.dtype,
                owner=stored[id(state[key])],
            )
            for key, shape in self._shapes.items()
            if id(state[key]) in stored
        }

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return one whole tensor, rounded as it was in training and then converted to `dtype`."""
        owner = self.tensors[name].owner
        group = self._group_of[owner]
        tensors = {key: self._files.read(key) for key in group.keys}
        value = convert_group(self.model, group, tensors, self._shapes)[owner]
        if not value.is_floating_point():
            return value
        value = value.to(self.dtype)
        return (rounded_to_nf4(value) if name in self.packed else value).to(dtype)
