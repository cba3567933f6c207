"""An RMS norm over features that are sharded over a tensor group, as OLMo 2 and OLMoE have it over all query heads.

D: features, d: those on this rank.

Source:
    arXiv 1910.07467; transformers models/olmoe/modeling_olmoe.py OlmoeRMSNorm, models/olmo2/modeling_olmo2.py
    Olmo2RMSNorm.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from toolkit.tensor_parallel.autograd import copy_to_region, reduce_from_region
from toolkit.tensor_parallel.grad_sync import sum_gradients
from toolkit.tensor_parallel.layout import Layout, Shard
from toolkit.tensor_parallel.linear import sharded_parameter


def norm_shards(layout: Layout) -> dict[str, Shard]:
    """Return how the weight of a norm over all features is sharded by their layout."""
    return {"weight": Shard(dim=0, layout=layout, dense_length=layout.length)}


class ParallelRMSNorm(nn.Module):
    """RMS norm y = w·x / √(mean x² + ε), with the mean over the features of all ranks.

    Args:
        dense: Norm of transformers, with a weight and `variance_epsilon`.
        layout: Layout of its features.
        tp_group: Ranks that share the features.
        replica_group: Ranks that have the same features as this one, if there are fewer heads than ranks.
        rounds_before_weight: Whether to round before multiplying by the weight, as OLMoE does; OLMo 2 and 3 round at the end.

    Collectives:
        forward: all-reduce of 4 bytes per token; backward: the same, and an all-reduce of the gradients of replicated
        weights.
    """

    weight: nn.Parameter

    def __init__(
        self,
        dense: nn.Module,
        layout: Layout,
        *,
        tp_group: dist.ProcessGroup,
        replica_group: dist.ProcessGroup | None = None,
        rounds_before_weight: bool = False,
    ) -> None:
        super().__init__()
        self.tp_group = tp_group
        self.rounds_before_weight = rounds_before_weight
        self.shards = norm_shards(layout)
        self.weight = sharded_parameter(dense.get_parameter("weight"), self.shards["weight"], tp_group=tp_group)
        self.variance_epsilon = float(dense.variance_epsilon)  # type: ignore[arg-type]
        [owners] = layout.owners(tp_group.size())
        self._counted_features = layout.length * owners  # a replicated feature is counted on each of its ranks
        if owners > 1:
            assert replica_group is not None, "a layout with replicated heads comes with their group"
            sum_gradients(self, ["weight"], group=replica_group)

    def forward(self, x_d: torch.Tensor) -> torch.Tensor:
        """Return the normalised features, computed in fp32. Shapes (…, d) to (…, d)."""
        scaled_d = x_d.float()
        squares_1 = reduce_from_region(scaled_d.square().sum(-1, keepdim=True), tp_group=self.tp_group)
        mean_1 = copy_to_region(squares_1, tp_group=self.tp_group) / self._counted_features
        normed_d = scaled_d * torch.rsqrt(mean_1 + self.variance_epsilon)
        if self.rounds_before_weight:
            return self.weight * normed_d.to(x_d.dtype)
        return (self.weight * normed_d).to(x_d.dtype)

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, eps={self.variance_epsilon}, rank {self.tp_group.rank()} of {self.tp_group.size()}"
