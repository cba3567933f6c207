"""LoRA around layers whose features are sharded over a tensor group.

y = x·Wᵀ + s·(x·Aᵀ)·Bᵀ. Around columns A is whole and B is sharded like the layer's output; each rank's B computes a part of
the gradient of x·Aᵀ, which is summed. Around a row A is sharded like the layer's input, each rank's x·Aᵀ is a partial sum,
and B is whole.

Source:
    arXiv 2106.09685, section 4.1; arXiv 1909.08053, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from toolkit.distributed.collectives import all_reduce
from toolkit.distributed.dtensors import copy_whole, is_dtensor
from toolkit.modeling.initialization import module_seed, seed_draws
from toolkit.tensor_parallel.autograd import (
    SEQUENCE_DIM,
    copy_to_region,
    gather_from_sequence,
    reduce_from_region,
    reduce_scatter_to_sequence,
)
from toolkit.tensor_parallel.grad_sync import gradient_group, sum_gradients
from toolkit.tensor_parallel.layout import Shard
from toolkit.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, ShardedLinear


def adapted_by() -> dict[type[nn.Module], type[nn.Module]]:
    """Return what `LoraConfig._register_custom_module` takes: peft's own adapter fits our layers, whose sizes are those of this rank."""
    from peft.tuners.lora import Linear as LoraLinear

    return {ColumnParallelLinear: LoraLinear, RowParallelLinear: LoraLinear}


def shard_adapters(model: nn.Module) -> None:
    """Shard the adapters around sharded layers, with the collectives that they need.

    Args:
        model: A `peft.PeftModel` whose sharded layers were adapted by `adapted_by()`.
    """
    from peft.tuners.lora import Linear as LoraLinear

    for module in model.modules():
        if not isinstance(module, LoraLinear):
            continue
        base: Any = module.get_base_layer()
        if (between := gradient_group(base)) is not None:  # a replicated layer that only this rank's shards read
            for name in module.lora_A:
                sum_gradients(module.lora_A[name], ["weight"], group=between)
                sum_gradients(module.lora_B[name], ["weight"], group=between)
        if not isinstance(base, ShardedLinear):
            continue
        cut = base.shards["weight"]
        for name in module.lora_A:
            a, b = module.lora_A[name], module.lora_B[name]
            if isinstance(base, ColumnParallelLinear):
                _cut(b, Shard(dim=0, layout=cut.layout, dense_length=cut.dense_length))
                if base.spec.replicated:
                    b.weight.register_hook(_SumReplicas(base))
                _read_by_columns(a, base)
            else:
                _cut(a, Shard(dim=1, layout=cut.layout, dense_length=cut.dense_length))
                assert isinstance(base, RowParallelLinear), "sharded linear layers are columns or rows"
                _give_to_row(a, b, base)


def _read_by_columns(a: nn.Module, base: ColumnParallelLinear) -> None:
    """Feed the output of A on the columns' input to each rank's B, with the collectives of its gradient.

    If the input was gathered from shards of the sequence, each rank computes a part of its gradient, which is summed where it
    was gathered; the gradient of A is such a partial sum, too.
    """
    group = base.tp_group
    if base.reads == "whole":
        _on_output(a, partial(copy_to_region, tp_group=group))
        return
    if base.reads == "piece":
        _on_output(a, partial(gather_from_sequence, dim=SEQUENCE_DIM, tp_group=group))
    sum_gradients(a, ["weight"], group=group)


def _give_to_row(a: nn.Module, b: nn.Module, base: RowParallelLinear) -> None:
    """Sum the outputs of the shards of A; with sequence parallelism B reads a shard, so its gradient is summed, too."""
    group = base.tp_group
    if not base.sequence_parallel:
        _on_output(a, partial(reduce_from_region, tp_group=group))
        return
    _on_output(a, partial(reduce_scatter_to_sequence, dim=SEQUENCE_DIM, tp_group=group))
    sum_gradients(b, ["weight"], group=group)


def _on_output(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return change(output)

    module.register_forward_hook(hook)


@torch.no_grad()
def draw_adapters(model: nn.Module, *, seed: int, deviates: bool) -> None:
    """Draw the A matrices of linear adapters from separate seeds, so that they are the same on any number of ranks.

    Args:
        model: A `peft.PeftModel`.
        seed: Any integer.
        deviates: Whether they are normal, of deviation 1 / r, and not uniform.

    Source:
        peft tuners/lora/layer.py reset_lora_parameters.
    """
    for name, module, base in _linear_adapters(model):
        weight, group = module.weight, _group_of(base)
        cut: Shard | None = getattr(module, "shards", {}).get("weight")
        shape = list(weight.shape)
        if cut is not None:
            shape[cut.dim] = cut.dense_length
        seed_draws(module_seed(seed, name))
        # FSDP2's shards are fp32: without it the adapters would have the dtype of what they adapt.
        of_base = getattr(base, "compute_dtype", base.weight.dtype)  # packed weights are integers
        dtype = of_base if is_dtensor(weight) else weight.dtype
        # Drawn in 16 bit, numbers that round to the upper bound would become the lower one (ATen DistributionsHelper.h).
        dense = torch.empty(shape, dtype=torch.float32, device=weight.device)
        if deviates:
            nn.init.normal_(dense, std=1 / shape[0])
        else:
            nn.init.kaiming_uniform_(dense, a=5**0.5)
        dense = dense.to(dtype)
        if cut is None:
            copy_whole(weight, dense)
        else:
            weight.copy_(cut.take(dense, rank=group.rank(), num_ranks=group.size()))


def _linear_adapters(model: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name and module of each A matrix, and the layer that it adapts."""
    from peft.tuners.lora import Linear as LoraLinear

    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            for adapter in module.lora_A:
                yield f"{name}.lora_A.{adapter}", module.lora_A[adapter], module.get_base_layer()


def _group_of(layer: Any) -> Any:
    """Return the tensor group of an adapted layer."""
    return getattr(layer, "tp_group", None)


def _cut(module: Any, shard: Shard) -> None:
    """Record that a linear layer of peft, built with this rank's sizes, is a shard."""
    module.shards = {"weight": shard}


class _SumReplicas:
    """Hook that sums the gradient of replicated output features, of which each rank has seen only its own consumers."""

    def __init__(self, base: ColumnParallelLinear) -> None:
        self._ranges, self._group = base.spec.replicated, base.spec.replica_group

    def __call__(self, grad: torch.Tensor) -> torch.Tensor:
        assert self._group is not None, "a layout with replicated heads comes with their group"
        summed = grad.clone()
        for own in self._ranges:
            rows = summed.narrow(0, own.start, len(own))
            rows.copy_(all_reduce(rows, group=self._group))
        return summed
