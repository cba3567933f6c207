"""Where the random draws of a run begin."""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_random_state(seed: int, *, dp_rank: int) -> None:
    """Seeds Python, NumPy, torch and CUDA: two runs of a job draw alike, two data-parallel ranks of a run do not."""
    words = [int(word) for word in np.random.SeedSequence([seed, dp_rank]).generate_state(3)]
    random.seed(words[0])
    np.random.seed(words[1])
    torch.manual_seed(words[2])
