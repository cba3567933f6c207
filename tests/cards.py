"""The CUDA devices of this machine, for tests that need one."""

from __future__ import annotations

import torch

# What the catalogue calls cards that compute in bf16.
NAMES = {
    "H200": "h200-sxm-141gb",
    "H100 80GB HBM3": "h100-sxm-80gb",
    "A100-SXM4-80GB": "a100-sxm-80gb",
    "L4": "l4-24gb",
    "L40S": "l40s-48gb",
}


def card() -> str | None:
    """The catalogue's name of the card at hand; None where there is none or it is not listed here."""
    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_name()
    return next((name for part, name in NAMES.items() if found.endswith(part)), None)
