"""The random state of a seed: repeated, restored, and different on each rank."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from toolkit.checkpoint.random_state import load_random_state, save_random_state
from toolkit.engine.seed import seed_random_state

Draw = tuple[float, float, float]


@pytest.fixture(autouse=True)
def _untouched():
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


def _draw() -> Draw:
    return random.random(), float(np.random.rand()), torch.nn.functional.dropout(torch.ones(64)).sum().item()


def _draws(count: int = 3) -> list[Draw]:
    return [_draw() for _ in range(count)]


def test_a_seed_repeats_itself_and_ranks_differ() -> None:
    found = []
    for seed, dp_rank, pp_rank in ((0, 0, 0), (0, 0, 0), (0, 1, 0), (1, 0, 0), (0, 0, 1), (0, 1, 1)):
        seed_random_state(seed, dp_rank=dp_rank, pp_rank=pp_rank)
        found.append(_draws())
    assert found[0] == found[1]
    assert len({tuple(draws) for draws in found}) == 5


def test_a_restored_state_goes_on(tmp_path: Path) -> None:
    (tmp_path / "random").mkdir()
    for rank in (0, 1):
        seed_random_state(5, dp_rank=rank)
        _draws()
        save_random_state(tmp_path, rank=rank)
        expected = _draws()
        seed_random_state(99, dp_rank=7)
        load_random_state(tmp_path, rank=rank)
        assert _draws() == expected
    assert sorted(path.name for path in (tmp_path / "random").iterdir()) == ["rank-00000.pt", "rank-00001.pt"]
