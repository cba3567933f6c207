"""Stacked experts of a mixture, with the inner features of each expert sharded over a tensor group.

E: experts, I: inner features, D: width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from toolkit.tensor_parallel.autograd import copy_to_region, reduce_from_region
from toolkit.tensor_parallel.grad_sync import sum_gradients
from toolkit.tensor_parallel.layout import Layout, Part, Shard
from toolkit.tensor_parallel.linear import sharded_parameter
from toolkit.tensor_parallel.plan import Experts

# Attributes with the inner width of an expert.
_INNER_SIZES = ("intermediate_dim", "intermediate_size", "expert_dim", "moe_intermediate_size")


def shard_experts(experts: nn.Module, style: Experts, *, tp_group: dist.ProcessGroup) -> None:
    """Shard the inner features of each expert; the module keeps its class and kernels.

    A bias of the output is whole on each rank, which adds its share of it.

    Collectives:
        forward: all-reduce of the output; backward: all-reduce of the gradients of the input, of the routing weights and of
        the bias of the output.

    Source:
        transformers integrations/moe.py; models/mixtral/modeling_mixtral.py MixtralExperts, gpt_oss GptOssExperts.
    """
    shards = expert_shards(experts, style)
    num_ranks, inner = tp_group.size(), shards["down_proj"].dense_length
    experts.shards = shards  # type: ignore[assignment]
    for name, shard in shards.items():
        experts.register_parameter(name, sharded_parameter(experts.get_parameter(name), shard, tp_group=tp_group))
    for name in _INNER_SIZES:
        if getattr(experts, name, None) == inner:
            setattr(experts, name, inner // num_ranks)
    shared = [name for name in ("down_proj_bias",) if experts._parameters.get(name) is not None]
    sum_gradients(experts, shared, group=tp_group)

    def copy_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        for name in shared:  # found before the parameter of that name
            module.__dict__[name] = module.get_parameter(name) / num_ranks
        return tuple(_copied(one, tp_group) for one in args), {
            name: _copied(one, tp_group) for name, one in kwargs.items()
        }

    def reduce_output(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        for name in shared:
            module.__dict__.pop(name, None)
        return reduce_from_region(output, tp_group=tp_group)

    for name in style.passes:  # each rank adds its share of what passes
        experts.get_submodule(name).register_forward_hook(lambda module, args, output: output / num_ranks)
    experts.register_forward_pre_hook(copy_inputs, with_kwargs=True)
    experts.register_forward_hook(reduce_output)


def expert_shards(experts: nn.Module, style: Experts) -> dict[str, Shard]:
    """Return how the parameters of stacked experts are sharded."""
    first, last = (2, 1) if style.transposed else (1, 2)
    inner = experts.get_parameter("down_proj").shape[last]
    one = Part(num_units=inner)
    single = Layout(parts=(one,))
    both = Layout(parts=(Part(num_units=inner, unit_size=2),)) if style.interleaved else Layout(parts=(one, one))
    shards = {"down_proj": Shard(dim=last, layout=single, dense_length=inner)}
    for name in ("gate_up_proj", "gate_proj", "up_proj"):
        layout = both if name == "gate_up_proj" else single
        if experts._parameters.get(name) is not None:
            shards[name] = Shard(dim=first, layout=layout, dense_length=layout.length)
        if experts._parameters.get(f"{name}_bias") is not None:
            shards[f"{name}_bias"] = Shard(dim=1, layout=layout, dense_length=layout.length)
    return shards


def _copied(argument: Any, tp_group: dist.ProcessGroup) -> Any:
    """Copy hidden states and routing weights into the region; the indices of the chosen experts have no gradient."""
    has_gradient = isinstance(argument, torch.Tensor) and argument.is_floating_point()
    return copy_to_region(argument, tp_group=tp_group) if has_gradient else argument
