"""Gradients of weights that are computed later."""

from __future__ import annotations

from collections import deque

import pytest
import torch

from toolkit.tensor_parallel.deferred_grads import DeferredWeightGrad, WeightGradStore


def test_nothing_waits_outside_of_a_block() -> None:
    gradients = WeightGradStore()
    with gradients.defer() as waiting:
        assert gradients.wait
    assert waiting == deque()
    assert not gradients.wait
    left = DeferredWeightGrad(parameters=(), compute=list, input=torch.zeros(()))
    with pytest.raises(ValueError, match="defer"):
        gradients.add(left)
