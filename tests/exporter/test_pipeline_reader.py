"""Stages as one checkpoint: what each holds, copies of tied weights, files of another run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from toolkit.errors import CheckpointError
from toolkit.exporter.pipeline_reader import UnitedCheckpoint
from toolkit.exporter.zero_reader import StoredTensor

HERE = Path("here")


@dataclass
class Held:
    """A stage's tensors."""

    values: dict[str, torch.Tensor]
    owners: dict[str, str] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        return {
            name: StoredTensor(shape=tuple(value.shape), dtype=value.dtype, owner=self.owners.get(name, name))
            for name, value in self.values.items()
        }

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return self.values[name].to(dtype)


def test_each_tensor_comes_from_its_stage() -> None:
    stages = [Held({"embed": torch.rand(4), "layers.0": torch.rand(2)}), Held({"layers.1": torch.rand(2)})]
    united = UnitedCheckpoint(HERE, stages, {})
    assert list(united.tensors) == ["embed", "layers.0", "layers.1"]
    assert torch.equal(united.read("layers.1", torch.bfloat16), stages[1].values["layers.1"].bfloat16())
    assert united.tensors["layers.1"] == stages[1].tensors["layers.1"]


def test_a_tied_weight_of_another_stage_is_the_same_tensor() -> None:
    stages = [Held({"embed": torch.rand(4)}), Held({"head": torch.rand(4)})]
    united = UnitedCheckpoint(HERE, stages, {"head": "embed"})
    assert united.tensors["head"].owner == united.tensors["embed"].owner == "embed"


def test_one_that_training_untied_on_its_stage_stays_so() -> None:
    values = {"embed": torch.rand(4), "head": torch.rand(4)}
    united = UnitedCheckpoint(HERE, [Held(values)], {"head": "embed"})
    assert united.tensors["head"].owner == "head"
    tied = UnitedCheckpoint(HERE, [Held(values, {"head": "embed"})], {"head": "embed"})
    assert tied.tensors["head"].owner == "embed"


def test_buffers_that_stages_share_are_read_once_and_weights_of_two_runs_are_damage() -> None:
    buffer = torch.rand(3)
    stages = [Held({"scale": buffer, "a": torch.rand(2)}), Held({"scale": buffer.clone(), "b": torch.rand(2)})]
    assert set(UnitedCheckpoint(HERE, stages, {}).tensors) == {"scale", "a", "b"}
    for other in (torch.rand(2), torch.rand(3)):
        stages[1].values["a"] = other
        with pytest.raises(CheckpointError) as caught:
            UnitedCheckpoint(HERE, stages, {})
        assert caught.value.codes == ("EXPORT_DAMAGED",)
        assert "stage 1 in here have a with other values" in str(caught.value)
