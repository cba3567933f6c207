"""Random seeds of a run."""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_random_state(seed: int, *, dp_rank: int, pp_rank: int = 0, step: int = 0) -> None:
    """Seed Python, NumPy, torch and CUDA: equal for two runs of a job, and for the tensor ranks of a stage.

    Data-parallel ranks have different seeds, and so do stages, whose layers would otherwise all drop the same elements.
    The first stage has the seed of a run without stages.

    Args:
        seed: Seed of the job.
        dp_rank: Data-parallel rank.
        pp_rank: Pipeline rank.
        step: Step at which a run goes on with other ranks than before, whose states no rank can take over.
    """
    place = [dp_rank, pp_rank, step] if step else [dp_rank, pp_rank] if pp_rank else [dp_rank]
    words = [int(word) for word in np.random.SeedSequence([seed, *place]).generate_state(3)]
    random.seed(words[0])
    np.random.seed(words[1])
    torch.manual_seed(words[2])
