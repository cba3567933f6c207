"""Batch normalisation with the mean and variance over the batches of all ranks, on cards and on the host."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from toolkit.compat.horovod import runtime
from toolkit.compat.horovod.errors import refuse_value
from toolkit.compat.horovod.exchanges import allgather_async
from toolkit.compat.horovod.reductions import Sum, allreduce_async
from toolkit.compat.horovod.submission import synchronize


class SyncBatchNorm(_BatchNorm):
    """`torch.nn.BatchNorm` of 1 to 3 dimensions whose batch is that of all ranks; batches may differ in size."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            refuse_value("input", f"input of {input.dim()} dimensions", "Give at least a batch and a channel dimension")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise a batch.

        Collectives:
            forward: all-gather of mean, variance and count; backward: all-reduce of two sums a channel.
        """
        self._check_input_dim(input)
        if (not self.training and self.track_running_stats) or runtime.size() == 1:
            return super().forward(input)
        result, mean, variance, count = _Normalised.apply(
            input, self.weight, self.bias, self.eps, runtime.engine().next_name("batch_norm")
        )  # type: ignore[no-untyped-call]
        if self.training and self.track_running_stats:
            self._track(mean, variance * count / (count - 1).clamp(min=1))
        return result  # type: ignore[no-any-return]

    def _track(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = 1 / int(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)


class _Normalised(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) * weight + bias, with statistics over all ranks.

    With n elements a channel in all, y the normalised input and g the gradient times the weight, the gradient of the input is
    (g - sum(g)/n - y sum(g y)/n) / sqrt(variance + eps), the sums being over all ranks.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, bias: Any, eps: float, name: str) -> Any:
        dims = [dim for dim in range(x.dim()) if dim != 1]
        wide = x.double() if x.dtype == torch.float64 else x.float()
        count = x.numel() // x.shape[1]
        if count:
            variance, mean = torch.var_mean(wide, dims, correction=0)
        else:
            mean = variance = wide.new_zeros(x.shape[1])
        own = torch.cat([mean, variance, wide.new_tensor([count])])
        means, variances, counts = synchronize(allgather_async(own[None], name)).split(
            [x.shape[1], x.shape[1], 1], dim=1
        )
        total = counts.sum()
        mean = (means * counts).sum(0) / total
        variance = ((variances + (means - mean) ** 2) * counts).sum(0) / total
        scale = torch.rsqrt(variance + eps)
        shape = [1, -1, *[1] * (x.dim() - 2)]
        y = (wide - mean.view(shape)) * scale.view(shape)
        ctx.save_for_backward(y, scale, weight)
        ctx.options = (dims, shape, total, name, bias is not None)
        result = y if weight is None else y * weight.view(shape) + bias.view(shape)
        ctx.mark_non_differentiable(mean, variance, total)
        return result.to(x.dtype), mean, variance, total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> Any:
        y, scale, weight = ctx.saved_tensors
        dims, shape, total, name, has_bias = ctx.options
        wide = grad.to(y.dtype)
        own_sum, own_product = wide.sum(dims), (wide * y).sum(dims)
        sums = synchronize(allreduce_async(torch.cat([own_sum, own_product]), name=f"{name}.gradient", op=Sum)) / total
        sum_grad, sum_product = sums.view(2, 1, -1).view(2, *shape)
        factor = scale if weight is None else scale * weight
        own = (wide - sum_grad - y * sum_product) * factor.view(shape)
        weight_grad = None if weight is None else own_product.to(weight.dtype)
        return own.to(grad.dtype), weight_grad, own_sum.to(weight.dtype) if has_bias else None, None, None
