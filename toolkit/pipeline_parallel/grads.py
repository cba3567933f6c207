"""What becomes of a stage's gradients between its first backward pass and the reduction over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn


class Fp32GradAccumulator:
    """Adds the gradients of all micro-batches of a step in fp32, whatever the dtype of the parameters, which stay whole.

    DeepSpeed's own accumulation in another dtype refuses to wait for the end of a step under ZeRO-1. Memory: 4 bytes a
    trainable parameter in place of its gradient, from the first backward pass of a step to `settle`.

    Args:
        parameters: Whose gradients are added up; those in fp32 are left as they are.

    Source:
        deepspeed runtime/engine.py coalesce_grad_reduction; zero/stage_1_and_2.py _fill_param_grad_accum_attribute, which it
        passes over.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._sums: dict[nn.Parameter, torch.Tensor] = {}
        for parameter in parameters:
            if parameter.requires_grad and parameter.dtype != torch.float32:
                parameter.register_post_accumulate_grad_hook(self.add)  # type: ignore[no-untyped-call]

    def add(self, parameter: nn.Parameter) -> None:
        """Move what a parameter's gradient holds to its sum; each backward pass does so by itself."""
        gradient = parameter.grad
        if gradient is None or parameter.dtype == torch.float32:  # torch calls this without a gradient, too
            return
        known = self._sums.get(parameter)
        if known is None:
            self._sums[parameter] = gradient.float()
        else:
            known.add_(gradient)
        parameter.grad = None

    def of(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return a parameter's sum of this step; None where it has none."""
        return self._sums.get(parameter)

    @torch.no_grad()
    def settle(self) -> None:
        """Round the sums to the dtype of the parameters as their gradients, and free them."""
        while self._sums:
            parameter, total = self._sums.popitem()
            parameter.grad = total.to(parameter.dtype)


class DeferredTiedGrad:
    """Keeps the gradient of one parameter whole, where those of others are reduced after each backward pass.

    Args:
        parameter: Which.
        in_fp32: Whether its gradients are added up in fp32.
        partitioned: Whether ranks hold parts of it between passes: it has no shape then by which a gradient could be set, so
            that one stays in its place.
    """

    def __init__(self, parameter: nn.Parameter, *, in_fp32: bool, partitioned: bool) -> None:
        self._parameter, self._in_fp32, self._partitioned = parameter, in_fp32, partitioned
        self._sum: torch.Tensor | None = None
        self._released = False

    @property
    def total(self) -> torch.Tensor:
        """The sum of this step's gradients."""
        assert self._sum is not None, "an embedding and a head have a gradient after each step"
        return self._sum

    @torch.no_grad()
    def take(self, parameter: nn.Parameter) -> bool:
        """Add a gradient that has just been computed to the sum, if it is that of the parameter; says whether it is."""
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
        """Make the sum the parameter's gradient again, to be reduced inside; the next step begins anew."""
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
    """Add up the gradients of a weight that the first and the last stage both hold, before data-parallel ranks reduce them.

    Over all replicas at once, so that every copy of the weight has one gradient: were they added pair by pair, each stage
    would then average over its replicas in an order of its own, and the two copies drift apart by roundings.

    Args:
        total: The gradient of this rank's copy.
        group: The two stages of all replicas.
        dp_size: Replicas, over which the gradient is the mean.

    Collectives:
        One all-reduce.
    """
    dist.all_reduce(total, group=group)
    total.div_(dp_size)
