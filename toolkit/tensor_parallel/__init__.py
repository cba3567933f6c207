"""Tensor parallelism of Hugging Face models: `apply_tensor_parallel`, and the styles that a sharding table is made of."""

from toolkit.tensor_parallel.apply import apply_tensor_parallel, parameter_shards
from toolkit.tensor_parallel.embedding import gather_scores
from toolkit.tensor_parallel.plan import (
    Attention,
    ColumnParallel,
    Experts,
    FeatureNorm,
    Heads,
    Replicated,
    RowParallel,
    TPPlan,
    Vocabulary,
)
from toolkit.tensor_parallel.tables import tp_plan_for

__all__ = [
    "Attention",
    "ColumnParallel",
    "Experts",
    "FeatureNorm",
    "Heads",
    "Replicated",
    "RowParallel",
    "TPPlan",
    "Vocabulary",
    "apply_tensor_parallel",
    "gather_scores",
    "parameter_shards",
    "tp_plan_for",
]
