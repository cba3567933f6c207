"""What ranks ask of each other: counts summed over all of them, read without making the host wait for the device."""

from __future__ import annotations

import torch


class LateCounts:
    """A reader of counts summed over all ranks, so that all of them act on a request after the same step.

    Args:
        late: Whether to read the counts of the previous call. On a GPU those have arrived by then, whereas reading the
            current ones would wait for all work queued there.
    """

    def __init__(self, *, late: bool) -> None:
        self._late = late
        self._waiting: tuple[torch.Tensor, torch.cuda.Event | None] | None = None

    def read(self, counts: torch.Tensor) -> list[float]:
        """Take what all ranks together ask for; return it, or what was taken at the previous call: zeros at the first.

        Args:
            counts: One number for each kind of request, summed over all ranks.
        """
        if not self._late:
            return counts.tolist()
        before, self._waiting = self._waiting, _send_to_host(counts)
        if before is None:
            return [0.0] * counts.numel()
        host, arrived = before
        if arrived is not None:
            arrived.synchronize()
        return host.tolist()


def _send_to_host(counts: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    if not counts.is_cuda:
        return counts.clone(), None
    host = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
    host.copy_(counts, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()
    return host, arrived
