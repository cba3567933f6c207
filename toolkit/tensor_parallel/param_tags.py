"""Marks for DeepSpeed of the parameters that are shards, so that the gradient norm counts each element of the model once."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from toolkit.errors import PlanError
from toolkit.tensor_parallel.apply import parameter_shards


def mark_parameters(model: nn.Module, *, tp_group: dist.ProcessGroup) -> None:
    """Mark the parameters that this rank counts in the norm, in addition to those that the first rank counts for all.

    A shard counts on its rank. A key head that several ranks have counts on the first of them; a replicated parameter counts
    only on the first rank, and needs no mark.

    Args:
        model: Model after `apply_tensor_parallel`, adapters included.
        tp_group: Ranks that share it.

    Raises:
        PlanError: TP_HEADS for a parameter that is partly replicated: DeepSpeed counts whole parameters.

    Source:
        deepspeed runtime/utils.py is_model_parallel_parameter; zero/stage_1_and_2.py get_grad_norm_direct, zero/stage3.py.
    """
    rank, size = tp_group.rank(), tp_group.size()
    for name, shard in parameter_shards(model).items():
        owners = set(shard.layout.owners(size))
        if len(owners) > 1:
            raise PlanError.of(
                code="TP_HEADS",
                key="parallel.tensor",
                message=f"tensor={size}: {name} has both heads of one rank and heads that {max(owners)} ranks "
                "replicate, but DeepSpeed's gradient norm counts a parameter as wholly sharded or wholly replicated",
                fix="Set parallel.tensor to a divisor of num_key_value_heads",
            )
        if rank % owners.pop() == 0:
            model.get_parameter(name).tensor_model_parallel = True  # type: ignore[attr-defined]


def counts_in_norm(parameter: nn.Parameter, *, tp_group: dist.ProcessGroup) -> bool:
    """Return whether this rank counts a parameter of a marked model in the norm."""
    return tp_group.rank() == 0 or getattr(parameter, "tensor_model_parallel", False)
