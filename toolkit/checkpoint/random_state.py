"""Random states of one rank: dropout begins where the seed says, and goes on where it stopped."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from toolkit.checkpoint.layout import RANDOM


def seed_random_state(seed: int, *, dp_rank: int) -> None:
    """Seeds Python, NumPy, torch and CUDA: two runs of a job draw alike, two data-parallel ranks of a run do not."""
    words = [int(word) for word in np.random.SeedSequence([seed, dp_rank]).generate_state(3)]
    random.seed(words[0])
    np.random.seed(words[1])
    torch.manual_seed(words[2])


def save_random_state(folder: Path, *, rank: int) -> None:
    """Writes the states of Python, NumPy, torch and CUDA."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }
    torch.save(state, _path(folder, rank))


def load_random_state(folder: Path, *, rank: int) -> None:
    """Restores what `save_random_state` wrote."""
    # The file is the manifest's own, so its pickled tuples are ours.
    state = torch.load(_path(folder, rank), weights_only=False)
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _path(folder: Path, rank: int) -> Path:
    return folder / RANDOM / f"rank-{rank:05d}.pt"
