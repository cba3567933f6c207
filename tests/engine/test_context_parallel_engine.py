"""Ranks that share rows by slices of their sequences train as one process of plain torch does, under every ZeRO stage."""

from __future__ import annotations

from typing import Any

import pytest
from courses import (
    ADAM,
    BF16,
    CLOSE,
    LORA,
    NEAR,
    SGD,
    Case,
    Course,
    assert_follows_plain_torch,
    parameters,
    train_cases,
)

CHUNKED, AGAIN = {"loss": "chunked"}, {"gradient_checkpointing": True}
TEN = 10
# Four ranks with one key head; two that have two of four; a window shorter than a slice.
SHARED = {"num_key_value_heads": 1, "num_attention_heads": 4}
HALVED = {"num_key_value_heads": 2, "num_attention_heads": 4}
ALONE: dict[str, Any] = {"data": 1, "context": 4}


def cases() -> dict[str, Case]:
    made: dict[str, Case] = {}
    for stage in range(4):
        made[f"sgd zero {stage}"] = Case(train=SGD, stage=stage, steps=TEN, context=2)
        made[f"lora zero {stage}"] = Case(train=LORA, stage=stage, context=2, packing="separated")
        made[f"one key head zero {stage}"] = Case(train=SGD, stage=stage, config=SHARED, **ALONE)
    for stage in (1, 3):
        made[f"adamw zero {stage}"] = Case(train=ADAM, stage=stage, data=1, context=2, **CLOSE)
        made[f"bf16 zero {stage}"] = Case(train=SGD | BF16, stage=stage, data=1, context=2, **NEAR)
    made["two key heads zero 2"] = Case(train=SGD | CHUNKED, stage=2, config=HALVED, packing="separated", **ALONE)
    made["checkpointing zero 3"] = Case(train=SGD | AGAIN, stage=3, architecture="qwen2", packing="none", context=2)
    made["lora checkpointing zero 3"] = Case(train=LORA | AGAIN | CHUNKED, stage=3, packing="none", context=2)
    made["window zero 2"] = Case(
        train=SGD | AGAIN, stage=2, architecture="mistral", config={"sliding_window": 3}, data=1, context=2
    )
    made["experts zero 2"] = Case(train=SGD, stage=2, architecture="qwen3_moe", data=1, context=2)
    made["tied zero 3"] = Case(train=SGD, stage=3, architecture="llama-tied", data=1, context=2)
    made["optimizer-cpu zero 2"] = Case(train=ADAM, stage=2, offload="optimizer-cpu", data=1, context=2, **CLOSE)
    made["smoothed zero 1"] = Case(train=SGD | {"z_loss": 1e-2}, stage=1, data=1, context=2)
    return made


CASES = cases()
# Each stage once, all of them over four ranks: one launch.
DEFAULT = ("sgd zero 0", "one key head zero 1", "two key heads zero 2", "lora checkpointing zero 3")


@pytest.fixture(scope="module")
def found() -> dict[str, list[Course | str]]:
    return train_cases(CASES, default=DEFAULT)


@pytest.fixture(scope="module")
def others() -> dict[str, list[Course | str]]:
    return train_cases(CASES, default=DEFAULT, others=True)


@pytest.mark.gloo
@pytest.mark.parametrize("name", parameters(CASES, default=DEFAULT))
def test_slices_train_as_plain_torch_does(name: str, request: pytest.FixtureRequest) -> None:
    results = request.getfixturevalue("found" if name in DEFAULT else "others")
    assert_follows_plain_torch(CASES[name], results[name])
