"""Tells DeepSpeed which parameters of a rank are shards, so that a gradient norm counts each number of the model once."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from toolkit.errors import PlanError
from toolkit.tensor_parallel.apply import parameter_shards


def mark_parameters(model: nn.Module, *, tp_group: dist.ProcessGroup) -> None:
    """Marks what this rank counts in the norm beside what the first rank counts for all.

    A shard counts on its rank. A key head that several ranks hold counts on the first of them; what is whole on every rank
    counts on the first alone, and needs no mark.

    Args:
        model: As `apply_tensor_parallel` made it; adapters in place.
        tp_group: Ranks that share it.

    Raises:
        PlanError: TP_HEADS for a parameter of which ranks share a part: DeepSpeed counts whole parameters.

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
                message=f"tensor={size}: {name} holds heads of one rank beside heads that {max(owners)} ranks share, and DeepSpeed "
                "counts a parameter in the gradient norm once or on each rank, not by parts",
                fix="Set parallel.tensor to a divisor of num_key_value_heads",
            )
        if rank % owners.pop() == 0:
            model.get_parameter(name).tensor_model_parallel = True  # type: ignore[attr-defined]


def counts_in_norm(parameter: nn.Parameter, *, tp_group: dist.ProcessGroup) -> bool:
    """Whether this rank counts a parameter of a marked model in the norm."""
    return tp_group.rank() == 0 or getattr(parameter, "tensor_model_parallel", False)
