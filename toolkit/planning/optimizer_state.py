"""Bytes of state that an optimizer keeps for each parameter that it trains."""

from __future__ import annotations

import math

from toolkit.config.job import Optimizer, Train

MASTER_BYTES = 4  # an fp32 copy

# Bytes per parameter in addition to it: Adam's two moments, Lion's one and the momentum of SGD in fp32 (arXiv 1910.02054,
# section 3.1; 2302.06675). 8-bit AdamW keeps two bytes, and for each of them a 4-byte scale per 256 elements (bitsandbytes
# optim/optimizer.py Optimizer2State.init_state).
MOMENT_BYTES: dict[Optimizer, float] = {
    "adamw": 8,
    "adamw_torch": 8,
    "adamw_8bit": 2 + 2 * 4 / 256,
    "lion": 4,
    "sgd": 4,
}

# Master copy and moments, rounded up.
STATE_BYTES: dict[Optimizer, int] = {name: MASTER_BYTES + math.ceil(size) for name, size in MOMENT_BYTES.items()}


def moment_bytes(train: Train) -> float:
    """Return the bytes of moments per parameter; SGD has none without momentum."""
    return 0 if train.optimizer == "sgd" and not train.momentum else MOMENT_BYTES[train.optimizer]
