"""The CUDA devices of this machine, for tests that need one."""

from __future__ import annotations

import torch

from toolkit.launch.devices import match_gpu


def card() -> str | None:
    """The catalogue's name of the card at hand; None where there is none, it is not listed or does not compute in bf16."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
        return None
    return match_gpu(torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory)
