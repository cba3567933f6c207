"""Stacked experts of a mixture, with the inner features of each expert sharded over a tensor group.

E: experts, I: inner features, D: width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from toolkit.tensor_parallel.autograd import copy_to_region, reduce_from_region
from toolkit.tensor_parallel.layout import Layout, Part, Shard
from toolkit.tensor_parallel.linear import sharded_parameter


def shard_experts(experts: nn.Module, *, tp_group: dist.ProcessGroup) -> None:
    """Shard `gate_up_proj` (E, 2·I, D) and `down_proj` (E, D, I) of each expert; the module keeps its class and kernels.

    Collectives:
        forward: all-reduce of the output; backward: all-reduce of the gradients of the input and of the routing weights.

    Source:
        transformers integrations/moe.py; models/mixtral/modeling_mixtral.py MixtralExperts.
    """
    shards = expert_shards(experts)
    inner = shards["down_proj"].dense_length
    experts.shards = shards  # type: ignore[assignment]
    for name, shard in shards.items():
        experts.register_parameter(name, sharded_parameter(experts.get_parameter(name), shard, tp_group=tp_group))
    if hasattr(experts, "intermediate_dim"):
        experts.intermediate_dim = inner // tp_group.size()  # type: ignore[assignment]

    def copy_inputs(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(_copied(argument, tp_group) for argument in args)

    def reduce_output(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        return reduce_from_region(output, tp_group=tp_group)

    experts.register_forward_pre_hook(copy_inputs)
    experts.register_forward_hook(reduce_output)


def expert_shards(experts: nn.Module) -> dict[str, Shard]:
    """Return how the parameters of stacked experts are sharded."""
    inner = experts.get_parameter("down_proj").shape[2]
    half = Part(num_units=inner)
    return {
        "gate_up_proj": Shard(dim=1, layout=Layout(parts=(half, half)), dense_length=2 * inner),
        "down_proj": Shard(dim=2, layout=Layout(parts=(half,)), dense_length=inner),
    }


def _copied(argument: Any, tp_group: dist.ProcessGroup) -> Any:
    """Copy hidden states and routing weights into the region; the indices of the chosen experts have no gradient."""
    has_gradient = isinstance(argument, torch.Tensor) and argument.is_floating_point()
    return copy_to_region(argument, tp_group=tp_group) if has_gradient else argument
