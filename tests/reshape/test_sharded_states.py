"""Parts of weights from the files of DDP and FSDP2: those rows alone are read."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY

from toolkit.engine.sharded_files import ShardReader
from toolkit.errors import CheckpointError
from toolkit.exporter.adapter import PartWeights
from toolkit.exporter.zero_reader import StoredTensor
from toolkit.reshape import sharded_states
from toolkit.reshape.sharded_states import PartOfFiles

NAME = "optimizer.w.exp_avg"
WHOLE = torch.arange(7 * 3 * 2, dtype=torch.float32).view(7, 3, 2)


def _part(folder: Path, cuts: tuple[int, ...] = (0, 4, 7)) -> PartOfFiles:
    """Ranks have whole rows, as FSDP2 cuts a weight."""
    for rank, (start, stop) in enumerate(pairwise(cuts)):
        places = {CUSTOM_METADATA_KEY: json.dumps({NAME: {SAVED_OFFSETS_KEY: [start, 0, 0]}})}
        save_file({NAME: WHOLE[start:stop].clone()}, folder / f"shard-{rank}.safetensors", places)
    stored = StoredTensor(shape=(7, 3, 2), dtype=torch.float32, owner=NAME)
    return PartOfFiles(folder, ShardReader(str(folder)), {"w": stored})


@pytest.mark.parametrize("cuts", [(0, 7), (0, 4, 7), (0, 1, 2, 6, 7)])
def test_every_part_is_that_of_the_whole(tmp_path: Path, cuts: tuple[int, ...]) -> None:
    part = _part(tmp_path, cuts)
    assert isinstance(part, PartWeights)
    flat = part.read("w", torch.float32).reshape(-1)
    assert torch.equal(flat, WHOLE.reshape(-1))
    for start in range(0, 42, 5):
        for stop in (start, start + 1, min(start + 4, 42), 42):
            assert torch.equal(part.read_part("w", start, stop, torch.float32), flat[start:stop])


def test_a_file_of_other_rows_is_not_opened(tmp_path: Path) -> None:
    part, opened = _part(tmp_path), []
    part.reader.read_metadata()
    real = sharded_states.safe_open

    def noting(path: str, framework: str) -> object:
        opened.append(Path(path).name)
        return real(path, framework=framework)

    with mock.patch.object(sharded_states, "safe_open", noting):
        part.read_part("w", 25, 30, torch.float32)
    assert opened == ["shard-1.safetensors"]


def test_rows_that_no_file_has_are_damage(tmp_path: Path) -> None:
    _part(tmp_path)
    (tmp_path / "shard-0.safetensors").unlink()
    stored = StoredTensor(shape=(7, 3, 2), dtype=torch.float32, owner=NAME)
    part = PartOfFiles(tmp_path, ShardReader(str(tmp_path)), {"w": stored})
    with pytest.raises(CheckpointError) as caught:
        part.read_part("w", 0, 30, torch.float32)
    assert caught.value.codes == ("EXPORT_DAMAGED",)
