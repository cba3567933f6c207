"""Random states of one rank, seeded by `tk.initialize`, and its position in streamed data: both go on where they stopped."""

from __future__ import annotations

import random
from collections.abc import Iterable
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


def load_random_state(folder: Path, *, rank: int) -> None:
    """Restore the states that `save_random_state` wrote.

    Raises:
        CheckpointError: CHECKPOINT_UNSAFE, CHECKPOINT_DAMAGED.
    """
    state = _read(folder, rank)
    try:
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        if state["cuda"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
    except (LookupError, TypeError, ValueError, RuntimeError, AttributeError, OverflowError) as error:
        raise CheckpointError(damaged(folder, _name(rank), f"has no random states: {error}")) from None


def load_stream_state(folder: Path, ranks: Iterable[int]) -> dict[str, Any] | None:
    """Return the position in streamed data that ranks have saved together; None if there is none.

    Args:
        folder: Checkpoint folder.
        ranks: One rank of each replica of the run that saved it.

    Raises:
        CheckpointError: CHECKPOINT_UNSAFE, CHECKPOINT_DAMAGED.
    """
    first, *others = ranks
    streams: list[Any] = [_read(folder, first).get("stream")]
    if streams[0] is None:
        return None
    streams += [_read(folder, rank).get("stream") for rank in others]
    try:
        if "parts" not in streams[0]:  # an earlier version's: each replica reads a part of its own
            return {"num_parts": len(streams), "parts": dict(enumerate(streams))}
        parts = {part: state for stream in streams for part, state in stream["parts"].items()}
        num_parts = streams[0]["num_parts"]
        if parts.keys() != set(range(num_parts)):  # a part without its position would be read from the beginning
            raise LookupError(f"parts {sorted(parts)} of {num_parts}")
        return {"num_parts": num_parts, "parts": parts}
    except (LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(damaged(folder, _name(first), f"has no position in a stream: {error!r}")) from None


def _read(folder: Path, rank: int) -> dict[str, Any]:
    try:
        return read_pickle(folder, _name(rank))
    except ValueError as error:
        raise CheckpointError(damaged(folder, _name(rank), str(error))) from None


def _name(rank: int) -> str:
    return f"{RANDOM}/rank-{rank:05d}.pt"
