"""A flag whether any rank has asked to stop, read without making the host wait for the device."""

from __future__ import annotations

import torch


class StopFlag:
    """A reader of a count summed over all ranks, so that all of them see a stop at the same step.

    Args:
        late: Whether to read the count of the previous call. On a GPU that one has arrived by then, whereas reading the
            current one would wait for all work queued there.
    """

    def __init__(self, *, late: bool) -> None:
        self._late = late
        self._waiting: tuple[torch.Tensor, torch.cuda.Event | None] | None = None

    def read(self, count: torch.Tensor) -> bool:
        """Take the number of ranks that ask to stop; return whether any does, or did at the previous call.

        Args:
            count: Number of ranks that ask to stop. Scalar, summed over all ranks, so that they agree.
        """
        if not self._late:
            return bool(count > 0)
        before, self._waiting = self._waiting, _send_to_host(count)
        if before is None:
            return False
        host, arrived = before
        if arrived is not None:
            arrived.synchronize()
        return bool(host > 0)


def _send_to_host(count: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    if not count.is_cuda:
        return count.clone(), None
    host = torch.empty((), dtype=count.dtype, pin_memory=True)
    host.copy_(count, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()
    return host, arrived
