"""Host memory that a card reads and writes by itself."""

from __future__ import annotations

import functools
import logging
from contextlib import suppress

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_CACHE_LINE = 64


def page_locked(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeroed host memory of exactly this size, page-locked for a CUDA card.

    torch's own page-locked memory comes in powers of two, and is never given back. Where the machine refuses (`ulimit -l`, a
    container's limit), the memory is plain, and one warning says what that costs.

    Args:
        numel: Number of elements.
        dtype: Their type.
        device: Device that copies to and from it.

    Returns:
        Tensor of shape (numel,), aligned to a cache line.

    Source:
        CUDA Runtime API, cudaHostRegister.
    """
    itemsize = torch.empty((), dtype=dtype).element_size()
    spare = _CACHE_LINE // itemsize
    whole = torch.zeros(numel + spare, dtype=dtype)
    shift = (-whole.data_ptr() % _CACHE_LINE) // itemsize
    memory = whole.narrow(0, shift, numel)
    lock(memory, device)
    return memory


def lock(memory: Tensor, device: torch.device) -> None:
    """Page-lock host memory where it is, for a CUDA card; where the machine refuses, leave it and warn, as `page_locked` does."""
    if device.type != "cuda" or not memory.numel():
        return
    size = memory.numel() * memory.element_size()
    result = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0))  # type: ignore[no-untyped-call]
    if result:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            with suppress(RuntimeError):  # it is CUDA's last error until torch looks for one, after its next kernel
                torch.zeros(1, device=device)
        _warn(result)


@functools.cache
def _warn(result: int) -> None:
    """Say once a process what plain memory costs: each buffer would say it again."""
    logger.warning(
        "Host memory cannot be page-locked (CUDA error %d), and is plain: the copies of gradients and weights wait for the card, and "
        "take about twice as long. Raise `ulimit -l` or the container's limit of locked memory",
        result,
    )


def unlock(memory: Tensor, device: torch.device) -> None:
    """Undo the page lock of `page_locked`, before the memory is freed."""
    if device.type == "cuda" and memory.numel() and memory.is_pinned():
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]
