"""What becomes of a stage's gradients between its first backward pass and the reduction over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn


class Fp32Gradients:
    """Adds the gradients of all micro-batches of a step in fp32, whatever the dtype of the parameters.

    DeepSpeed's own accumulation in another dtype refuses to wait for the end of a step under ZeRO-1, and does nothing under
    ZeRO-2 and 3. Memory: 4 bytes a trainable parameter beside its gradient, from the first backward pass of a step to `settle`.

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
        """Moves what a parameter's gradient holds to its sum; each backward pass does so by itself."""
        gradient = parameter.grad
        if (
            gradient is None or parameter.dtype == torch.float32
        ):  # torch calls it as well where a backward pass gives none
            return
        known = self._sums.get(parameter)
        if known is None:
            self._sums[parameter] = gradient.float()
        else:
            known.add_(gradient)
        # Kept, not dropped: a partitioned parameter has no shape at the end of the step that a new one could be set by.
        gradient.zero_()

    def of(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Gives a parameter's sum of this step; None where it has none."""
        return self._sums.get(parameter)

    @torch.no_grad()
    def settle(self) -> None:
        """Rounds the sums to the gradients of the parameters, and frees them."""
        while self._sums:
            parameter, total = self._sums.popitem()
            assert parameter.grad is not None, "`add` has left it"
            parameter.grad.copy_(total)


@torch.no_grad()
def sum_tied(weight: nn.Parameter, *, group: dist.ProcessGroup, dp_size: int, sums: Fp32Gradients | None) -> None:
    """Adds up the gradients of a weight that the first and the last stage both hold, before data-parallel ranks reduce them.

    Over all replicas at once, so that every copy of the weight has one gradient: were they added pair by pair, each stage
    would then average over its replicas in an order of its own, and the two copies drift apart by roundings.

    Args:
        weight: This rank's copy.
        group: The two stages of all replicas.
        dp_size: Replicas, over which the gradient is the mean.
        sums: Where gradients are added up in fp32, if they are.

    Collectives:
        One all-reduce.
    """
    total = None if sums is None else sums.of(weight)
    if total is None:
        assert weight.grad is not None, "an embedding and a head have a gradient after each step"
        total = weight.grad
    dist.all_reduce(total, group=group)
    total.div_(dp_size)
