"""Random states: the same job draws the same, ranks draw apart, a resume goes on."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from toolkit.checkpoint.random_state import load_random_state, load_stream_state, save_random_state
from toolkit.errors import CheckpointError


@pytest.fixture(autouse=True)
def _untouched():
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


@pytest.mark.parametrize("part", ["python", "numpy", "torch"])
@pytest.mark.parametrize("wrong", [None, (1, 2), {"a": 1}, []])
def test_states_of_another_form_are_damage(tmp_path: Path, part: str, wrong: object) -> None:
    (tmp_path / "random").mkdir()
    save_random_state(tmp_path, rank=0)
    path = tmp_path / "random" / "rank-00000.pt"
    torch.save(torch.load(path, weights_only=False) | {part: wrong}, path)
    with pytest.raises(CheckpointError, match="has no random states") as caught:
        load_random_state(tmp_path, rank=0)
    assert caught.value.codes == ("CHECKPOINT_DAMAGED",)


def test_a_stream_has_the_position_of_each_of_its_parts(tmp_path: Path) -> None:
    (tmp_path / "random").mkdir()
    for rank, parts in enumerate(({0: {"row": 5}}, {1: {"row": 7}})):
        save_random_state(tmp_path, rank=rank, stream={"num_parts": 2, "parts": parts})
    found = load_stream_state(tmp_path, [0, 1])
    assert found == {"num_parts": 2, "parts": {0: {"row": 5}, 1: {"row": 7}}}
    with pytest.raises(CheckpointError, match=r"parts \[0\] of 2") as caught:
        load_stream_state(tmp_path, [0])
    assert caught.value.codes == ("CHECKPOINT_DAMAGED",)
