"""Silence for what installed packages log at their import, and the user of a command cannot mend."""

from __future__ import annotations

import logging

_LOGGERS = (
    "torchao",  # each of its kernels that cannot run on this machine
    "torch.utils._pytree",  # each deprecated call of torchao's
    "bitsandbytes.backends.cpu.ops",  # without cards: a kernel for inference that the package `kernels` lacks
)


def quiet_packages() -> None:
    """Hide what torchao and bitsandbytes log when transformers and peft import them; their errors stay."""
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
