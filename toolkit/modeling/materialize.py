"""Allocation of a model from the meta device, whole or partitioned, that keeps attributes and hooks of its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from toolkit.distributed.deepspeed_private import partition_module, zero_init
from toolkit.tensor_parallel.grad_sync import carry_hooks


def allocate(
    model: nn.Module,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    zero_config: Mapping[str, Any] | None = None,
    dp_group: dist.ProcessGroup | None = None,
    mpu: Any = None,
    empty_like: Callable[..., Tensor] = torch.empty_like,
) -> None:
    """Allocate each weight and buffer of a meta model on `device`, uninitialised.

    Weights that modules share stay shared. Attributes and hooks of weights are kept, which `to_empty` would lose: the hooks
    sum the gradients of weights that several ranks of a tensor group have.

    Args:
        model: Model on the meta device, sharded or not.
        device: Device to allocate on.
        dtype: Data type of floating-point weights; by default their own, under ZeRO-3 that of its configuration.
        zero_config: DeepSpeed configuration whose ZeRO-3 partitions the weights, one module after the other, as if the
            model had been built under `deepspeed.zero.Init`; if None each rank has whole weights.
        dp_group: Ranks over which ZeRO-3 partitions each weight; all if None.
        mpu: Model-parallel unit that DeepSpeed asks for the tensor groups.
        empty_like: Function that allocates one tensor.
    Collectives:
        Under ZeRO-3 a broadcast of each weight over `dp_group`.
    """
    partition = None if zero_config is None else zero_init(zero_config, dp_group=dp_group, mpu=mpu)
    dtype = dtype if partition is None else partition.dtype
    made: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                if weight not in made:
                    made[weight] = _weight_like(weight, device, dtype, empty_like)
                module._parameters[name] = made[weight]  # type: ignore[assignment]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = made.setdefault(buffer, empty_like(buffer, device=device))
        if partition is not None:
            partition_module(partition, module)


def _weight_like(
    weight: nn.Parameter, device: torch.device, dtype: torch.dtype | None, empty_like: Callable[..., Tensor]
) -> nn.Parameter:
    kind = dtype if weight.is_floating_point() else None
    made = nn.Parameter(empty_like(weight, dtype=kind, device=device), requires_grad=weight.requires_grad)
    made.__dict__.update(weight.__dict__)
    carry_hooks(weight, made)
    return made
