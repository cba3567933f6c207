"""Peak memory of a rank by phase, as the estimate reports it."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable

import torch


class PhaseMemoryTracker:
    """A tracker of the highest allocated memory of each phase.

    CUDA has one peak counter; it is read and reset at the end of a phase, on the host and without synchronization.

    Args:
        device: Device of this rank.
        read: Returns the peak since the last reset, bytes; torch's counter when left out.
        reset: Resets that peak.

    Attributes:
        peaks: Highest bytes of each phase that has ended; empty on CPU, where torch counts nothing.
    """

    def __init__(
        self, device: torch.device, *, read: Callable[[], int] | None = None, reset: Callable[[], None] | None = None
    ) -> None:
        self._device = device
        self._counts = device.type == "cuda" or read is not None
        self._read = read or (lambda: int(torch.cuda.max_memory_allocated(device)))
        self._reset = reset or (lambda: torch.cuda.reset_peak_memory_stats(device))
        self.peaks: dict[str, int] = {}

    def end(self, phase: str) -> None:
        """End a phase and start the next."""
        if not self._counts:
            return
        self.peaks[phase] = max(self.peaks.get(phase, 0), self._read())
        self._reset()

    @property
    def peak_bytes(self) -> int:
        """Highest allocated bytes of the run; on CPU, of the process's resident memory."""
        if self._counts:
            return max(self._read(), *self.peaks.values(), 0)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
