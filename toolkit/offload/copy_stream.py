"""The stream on which a card copies from host memory beside its kernels, with the events by which both wait for each other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class CopyStream:
    """A stream of copies to a card. On CPU, where each copy is done when its call returns, everything here is nothing.

    Args:
        device: The card.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type != "cpu" else None  # type: ignore[no-untyped-call]

    def event(self) -> Any:
        """Return a new event."""
        return None if self._stream is None else torch.cuda.Event()  # type: ignore[no-untyped-call]

    def kernels_reach(self, event: Any) -> None:
        """Have an event happen when the kernels that are queued by now have ended."""
        if self._stream is not None:
            event.record(torch.cuda.current_stream(self._device))

    def kernels_wait_for(self, event: Any) -> None:
        """Make kernels that are queued from now on wait for an event; one that nothing was made to reach has happened."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def kernels_wait_for_copies(self) -> None:
        """Make kernels that are queued from now on wait for all copies that are queued by now."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def copies_wait_for_kernels(self) -> None:
        """Make copies that are queued from now on wait for all kernels that are queued by now."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, queue: Callable[[], None], *, after: Any, reach: Any) -> None:
        """Queue copies.

        Args:
            queue: Calls the copies.
            after: Event for which they wait.
            reach: Event that happens when they have ended.
        """
        if self._stream is not None:
            self._stream.wait_event(after)
        with self._current():
            queue()
        if self._stream is not None:
            reach.record(self._stream)

    def synchronize(self) -> None:
        """Wait for all copies."""
        if self._stream is not None:
            self._stream.synchronize()

    def _current(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
