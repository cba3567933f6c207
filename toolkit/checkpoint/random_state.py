"""Random states of one rank, which `tk.initialize` seeds: dropout goes on where it stopped."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from toolkit.checkpoint.layout import RANDOM


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
