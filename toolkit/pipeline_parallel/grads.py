"""Gradients of a stage between its first backward pass and the reduction over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn


class Fp32GradAccumulator:
    """Accumulates the gradients of a step's micro-batches in fp32 for parameters of any dtype, which are not partitioned.

    DeepSpeed's own accumulation in another dtype cannot be deferred to the end of a step under ZeRO-1. Memory: 4 bytes per
    trainable parameter in place of its gradient, from the first backward pass of a step to `settle`.

    Args:
        parameters: Parameters whose gradients are accumulated; those in fp32 are left to autograd.

    Source:
        deepspeed runtime/engine.py coalesce_grad_reduction; zero/stage_1_and_2.py _fill_param_grad_accum_attribute, which it
        skips.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._sums: dict[nn.Parameter, torch.Tensor] = {}
        for parameter in parameters:
            if parameter.requires_grad and parameter.dtype != torch.float32:
                parameter.register_post_accumulate_grad_hook(self.add)  # type: ignore[no-untyped-call]

    def add(self, parameter: nn.Parameter) -> None:
        """Move a parameter's gradient to its sum; a hook does so in each backward pass."""
        gradient = parameter.grad
        if gradient is None or parameter.dtype == torch.float32:  # torch also calls this without a gradient
            return
        known = self._sums.get(parameter)
        if known is None:
            self._sums[parameter] = gradient.float()
        else:
            known.add_(gradient)
        parameter.grad = None

    def of(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return a parameter's sum of this step; None if it has none."""
        return self._sums.get(parameter)

    @torch.no_grad()
    def settle(self) -> None:
        """Round the sums to the dtype of the parameters as their gradients, and free them."""
        while self._sums:
            parameter, total = self._sums.popitem()
            parameter.grad = total.to(parameter.dtype)


class DeferredTiedGrad:
    """Keeps one parameter's gradient unreduced until the end of a step; others are reduced after each backward pass.

    Args:
        parameter: Parameter whose reduction is deferred.
        in_fp32: Whether its gradients are accumulated in fp32.
        partitioned: Whether it is partitioned between passes (ZeRO-3): it then has no shape that a gradient could be set for,
            so a gradient stays in its place.
    """

    def __init__(self, parameter: nn.Parameter, *, in_fp32: bool, partitioned: bool) -> None:
        self._parameter, self._in_fp32, self._partitioned = parameter, in_fp32, partitioned
        self._sum: torch.Tensor | None = None
        self._released = False

    @property
    def total(self) -> torch.Tensor:
        """Sum of this step's gradients."""
        assert self._sum is not None, "an embedding and a head have a gradient after each step"
        return self._sum

    @torch.no_grad()
    def take(self, parameter: nn.Parameter) -> bool:
        """Add a newly computed gradient to the sum if it belongs to the parameter, and return whether it does."""
        if parameter is not self._parameter or self._released:
            return False
        gradient = parameter.grad
        if gradient is None:
            return True
        if self._sum is None:
            self._sum = gradient.float() if self._in_fp32 else gradient
        elif self._sum is not gradient:
            self._sum.add_(gradient)
        if not self._partitioned:
            parameter.grad = None
        elif self._sum is not gradient:
            gradient.zero_()
        return True

    @contextmanager
    def released(self) -> Iterator[None]:
        """Set the sum as the parameter's gradient, to be reduced inside the block, then reset the sum for the next step."""
        parameter, total = self._parameter, self.total
        if parameter.grad is None:
            parameter.grad = total.to(parameter.dtype)
        elif parameter.grad is not total:
            parameter.grad.copy_(total)
        self._sum, self._released = None, True
        try:
            yield
        finally:
            self._released = False


@torch.no_grad()
def all_reduce_tied_grad(total: torch.Tensor, *, group: dist.ProcessGroup, dp_size: int) -> None:
    """Sum the gradients of a tied weight over the first and last stage and all replicas, before the data-parallel reduction.

    One all-reduce over all replicas gives every copy of the weight the same gradient: if they were summed pair by pair, each
    stage would then average over its replicas in its own order, and the two copies would drift apart by rounding.

    Args:
        total: Gradient of this rank's copy.
        group: Ranks of the two stages of all replicas.
        dp_size: Number of replicas, over which the gradient is averaged.

    Collectives:
        One all-reduce, the size of `total`.
    """
    dist.all_reduce(total, group=group)
    total.div_(dp_size)
