"""Random states of one rank, seeded by `tk.initialize`, and its position in streamed data: both go on where they stopped."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from toolkit.checkpoint.layout import RANDOM
from toolkit.checkpoint.manifest import damaged
from toolkit.checkpoint.pickles import read_pickle
from toolkit.errors import CheckpointError


def save_random_state(folder: Path, *, rank: int, stream: dict[str, Any] | None = None) -> None:
    """Write the states of Python, NumPy, torch and CUDA, and of a stream if there is one."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }
    if stream is not None:
        state["stream"] = stream
    torch.save(state, folder / _name(rank))


def load_random_state(folder: Path, *, rank: int) -> dict[str, Any] | None:
    """Restore the states that `save_random_state` wrote, and return that of a stream if there is one.

    Raises:
        CheckpointError: CHECKPOINT_UNSAFE, CHECKPOINT_DAMAGED.
    """
    name = _name(rank)
    try:
        state = read_pickle(folder, name)
    except ValueError as error:
        raise CheckpointError(damaged(folder, name, str(error))) from None
    try:
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        if state["cuda"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
    except (LookupError, TypeError, ValueError, RuntimeError, AttributeError, OverflowError) as error:
        raise CheckpointError(damaged(folder, name, f"has no random states: {error}")) from None
    stream: dict[str, Any] | None = state.get("stream")
    return stream


def _name(rank: int) -> str:
    return f"{RANDOM}/rank-{rank:05d}.pt"
