"""The names that the rules of tensor parallelism share with modules that they must not import."""

from __future__ import annotations

from pathlib import Path

import pytest
from plan_jobs import plan_of, problems_of
from tiny_models import tiny_config

from toolkit.data.packing import ROUND_TO
from toolkit.planning.rules import tensor
from toolkit.tensor_parallel.plan import ColumnParallel
from toolkit.tensor_parallel.tables import DERIVED, tp_plan_for


def test_the_known_architectures_are_those_with_tables() -> None:
    written = {"falcon", "gpt2", "gpt_neox", "olmo2", "olmo3", "olmoe", "opt", "phi3"}
    assert {*DERIVED} | written == tensor.TENSOR_MODEL_TYPES


@pytest.mark.parametrize("architecture", ["gpt2", "gpt_neox", "phi3", "falcon", "llama", "qwen3", "olmoe", "opt"])
def test_fused_architectures_keep_heads_in_one_matrix(architecture: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(architecture))
    columns = [style for style in tp_plan_for(model).table.values() if isinstance(style, ColumnParallel)]
    fused = any({"query", "key_value"} <= set(column.parts) for column in columns)
    assert fused == (model.config.model_type in tensor.FUSED_MODEL_TYPES)


def test_rows_are_padded_to_what_the_rule_says() -> None:
    assert tensor.PADDED_TO == ROUND_TO


def test_a_tensor_group_counts_once_in_the_batch() -> None:
    plan = plan_of(model="llama-3.1-8b", ranks=8, parallel={"tensor": 4})
    assert (plan.grid.tp, plan.grid.dp, plan.settings.batch.dp_size) == (4, 2, 2)
    assert (
        plan.deepspeed_config()["train_batch_size"] == plan.settings.batch.micro * plan.settings.batch.accumulation * 2
    )
    assert not plan.settings.sequence_parallel
    assert "parallel.sequence_parallel" in plan.explain()


def test_sizes_of_whole_experts_divide_the_heads_too(tmp_path: Path) -> None:
    config = tiny_config("qwen3_moe")
    config.num_experts = 5
    config.save_pretrained(tmp_path)
    (problem,) = problems_of(model=str(tmp_path), ranks=2, parallel={"tensor": 2, "experts": "whole"})
    assert (problem.code, problem.fix) == ("TP_EXPERTS", "Set parallel.experts to sliced")
