"""Norms over the features of all ranks round where the dense ones do."""

from __future__ import annotations

import pytest
import torch
from sharded_models import dense_model

from toolkit.distributed.fake import fake_group
from toolkit.tensor_parallel.apply import apply_tensor_parallel
from toolkit.tensor_parallel.norm import ParallelRMSNorm
from toolkit.tensor_parallel.tables import tp_plan_for


@pytest.mark.parametrize("name", ["olmo2", "olmo3", "olmoe"])
def test_in_bf16_a_rank_alone_gives_the_dense_numbers_to_the_last_bit(name: str) -> None:
    dense, sharded = (dense_model(name, 4).to(torch.bfloat16) for _ in range(2))
    with fake_group(1) as group:
        apply_tensor_parallel(sharded, tp_plan_for(sharded), tp_group=group)
        for which in ("q_norm", "k_norm"):
            path = f"model.layers.0.self_attn.{which}"
            ours, theirs = sharded.get_submodule(path), dense.get_submodule(path)
            assert isinstance(ours, ParallelRMSNorm)
            x = torch.randn(64, len(theirs.get_parameter("weight")), generator=torch.Generator().manual_seed(0))
            assert torch.equal(ours(3 * x.bfloat16()), theirs(3 * x.bfloat16()))
