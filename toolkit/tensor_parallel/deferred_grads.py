"""Gradients of weights that wait: a backward pass gives the gradient of a linear layer's input, the weight's comes on demand.

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
    """What is left of the backward pass of a linear layer, or of several that read one input.

    Args:
        parameters: Whose gradients are missing.
        compute: Gives the gradient of each; it holds what it needs, the layer's input and its output's gradient.
        input: What it keeps of the former.
    """

    parameters: Sequence[nn.Parameter]
    compute: Callable[[], Sequence[torch.Tensor]]
    input: torch.Tensor


class WeightGradStore:
    """Tells the linear layers of a rank whether the gradients of their weights wait."""

    def __init__(self) -> None:
        self._waiting: deque[DeferredWeightGrad] | None = None

    @property
    def wait(self) -> bool:
        """Whether a backward pass leaves them to be computed later."""
        return self._waiting is not None

    @contextmanager
    def defer(self) -> Iterator[deque[DeferredWeightGrad]]:
        """Collects what the backward passes of a block leave, in the order in which they come to it."""
        waiting: deque[DeferredWeightGrad] = deque()
        self._waiting = waiting
        try:
            yield waiting
        finally:
            self._waiting = None

    def add(self, delayed: DeferredWeightGrad) -> None:
        """Leaves something to be computed later.

        Raises:
            ValueError: Outside of `defer`.
        """
        if self._waiting is None:
            raise ValueError("nothing waits outside of `defer`")
        self._waiting.append(delayed)
