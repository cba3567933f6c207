"""Where the random draws of a run begin."""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_random_state(seed: int, *, dp_rank: int, pp_rank: int = 0) -> None:
    """Seeds Python, NumPy, torch and CUDA: two runs of a job draw alike, as do the tensor ranks of a stage.

    Two data-parallel ranks draw differently, and so do two stages, whose layers would otherwise all drop the same elements.
    The first stage draws as a run without stages does.
    """
    place = [dp_rank, pp_rank] if pp_rank else [dp_rank]
    words = [int(word) for word in np.random.SeedSequence([seed, *place]).generate_state(3)]
    random.seed(words[0])
    np.random.seed(words[1])
    torch.manual_seed(words[2])
