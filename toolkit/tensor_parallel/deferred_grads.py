"""Deferred weight gradients: a backward pass computes the input gradient of a linear layer, the weight's comes on demand.

Source:
    arXiv 2401.10241, section 2: the two products of a linear layer's backward pass do not depend on each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class DeferredWeightGrad:
    """The deferred half of the backward pass of a linear layer, or of several that read one input.

    Args:
        parameters: Parameters whose gradients are missing.
        compute: Returns the gradient of each; it owns the layer's input and the gradient of its output.
        input: The part of the layer's input that `compute` keeps.
    """

    parameters: Sequence[nn.Parameter]
    compute: Callable[[], Sequence[torch.Tensor]]
    input: torch.Tensor


class WeightGradStore:
    """Tells the linear layers of a rank whether to defer their weight gradients, and collects the deferred ones."""

    def __init__(self) -> None:
        self._waiting: deque[DeferredWeightGrad] | None = None

    @property
    def wait(self) -> bool:
        """True if backward passes defer the weight gradients."""
        return self._waiting is not None

    @contextmanager
    def defer(self) -> Iterator[deque[DeferredWeightGrad]]:
        """Collect the weight gradients that backward passes inside the `with` block defer, in their order."""
        waiting: deque[DeferredWeightGrad] = deque()
        self._waiting = waiting
        try:
            yield waiting
        finally:
            self._waiting = None

    def add(self, delayed: DeferredWeightGrad) -> None:
        """Append a deferred computation to the queue.

        Raises:
            ValueError: If called outside of `defer`.
        """
        if self._waiting is None:
            raise ValueError("nothing waits outside of `defer`")
        self._waiting.append(delayed)
