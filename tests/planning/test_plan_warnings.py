"""Values that a plan may have and that are rarely meant."""

from __future__ import annotations

from typing import Any

import pytest
from plan_jobs import plan_of

from toolkit.planning.plan_warnings import plan_warnings


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ({"learning_rate": 1e-2}, ""),
        ({"learning_rate": 1000}, "learning_rate=1000 is above 0.01"),
        ({"learning_rate": 0.1, "method": "lora"}, ""),
        ({"learning_rate": 0.2, "method": "lora"}, "is above 0.1, where adamw with method=lora"),
        ({"learning_rate": 30, "optimizer": "sgd"}, ""),
        ({"learning_rate": 1000, "optimizer": "sgd"}, "is above 100, where sgd"),
        (
            {
                "learning_rate": 1e-2,
                "learning_rate_scaling": "linear",
                "learning_rate_reference_batch_size": 1,
                "train_batch_size": 8,
            },
            "learning_rate=0.08 after learning_rate_scaling=linear is above 0.01",
        ),
    ],
)
def test_a_learning_rate_that_diverges(train: dict[str, Any], said: str) -> None:
    warnings = list(plan_warnings(plan_of(train=train)))
    assert [said in warning for warning in warnings] == ([True] if said else [])


def test_a_derived_table_is_announced() -> None:
    [warning] = plan_warnings(plan_of(model="deepseek-v2-lite", parallel={"tensor": 2}, ranks=2))
    assert "tensor=2 with model_type=deepseek_v2, for which no table of styles is written" in warning
    assert "`toolkit models --support deepseek-v2-lite`" in warning
    assert list(plan_warnings(plan_of(model="llama-3.1-8b", parallel={"tensor": 2}, ranks=2))) == []
