"""Pipelines and tensor ranks over NCCL train as one process of plain torch does; where cards are few, the ranks share one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cards import card
from courses import ADAM, LORA, NEAR, SGD, SUMS, Case, arguments_of, assert_follows_plain_torch, train_all
from ranks import run_on_cards

from tests.engine.test_torch_engine import save_and_resume

FOUR = {"num_hidden_layers": 4}
PAIR: dict[str, Any] = {"pipeline": 2, "data": 2, "micro_batches": 4, "config": FOUR}
DEEP: dict[str, Any] = {"pipeline": 4, "data": 1, "micro_batches": 6, "config": FOUR, "architecture": "llama-tied"}
CUBE: dict[str, Any] = {"pipeline": 2, "data": 1, "tensor": 2, "micro_batches": 3, "config": FOUR}
# fp32 of a card adds up in another order than a CPU's.
CLOSE: dict[str, Any] = {"tolerance": 5e-5, "weight_tolerance": 5e-5}
CASES = {
    "1f1b zero 1": Case(train=SGD, stage=1, **DEEP, **CLOSE),
    "gpipe zero 3": Case(train=SGD, stage=3, schedule="gpipe", **PAIR, **CLOSE),
    "interleaved zero 2": Case(train=SGD, stage=2, schedule="interleaved", virtual_stages=2, **PAIR, **CLOSE),
    "zb-h1 zero 1": Case(train=SGD | {"gradient_checkpointing": True}, stage=1, schedule="zb-h1", **DEEP, **CLOSE),
    "pieces zero 2": Case(train=SGD, stage=2, sequence_parallel=True, **CUBE, **CLOSE),
    "fp32 sums zero 2": Case(train=SGD | SUMS, stage=2, architecture="llama-tied", **PAIR, **NEAR),
    "fp16 zero 1": Case(train=SGD | {"precision": "fp16"}, stage=1, **PAIR, **NEAR),
    "lora zero 3": Case(train=LORA, stage=3, **CUBE, **CLOSE),
    "offloaded zero 2": Case(
        train=SGD | {"gradient_checkpointing": True}, stage=2, offload="activations-cpu", **PAIR, **CLOSE
    ),
    "padded zero 1": Case(train=SGD, stage=1, packing="none", **(PAIR | {"architecture": "qwen2"}), **CLOSE),
}
CASES = {name: replace(case, steps=3) for name, case in CASES.items()}

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(card() is None, reason="needs a CUDA device that computes in bf16")]


@pytest.fixture(scope="module")
def courses() -> list[dict[str, Any]]:
    return run_on_cards(
        train_all, 4, arguments_of(CASES, gpu=str(card())), num_cards=torch.cuda.device_count(), timeout_seconds=400
    )


@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", CASES)
def test_trains_as_plain_torch_does(courses: list[dict[str, Any]], name: str) -> None:
    assert_follows_plain_torch(CASES[name], [rank[name] for rank in courses], drawn_on="cuda")


@pytest.mark.timeout(500)
def test_paged_states_step_as_those_on_the_card_and_resume(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    wide = {"hidden_size": 512, "intermediate_size": 1024}  # moments of 100,000 numbers and more are paged
    places: dict[str, dict[str, Any]] = {
        "ddp": {"strategy": "ddp"},
        "fsdp2": {"strategy": "fsdp2"},
        "zero 2": {"stage": 2},
    }
    plans = {
        f"{optimizer} {name}": Case(train=ADAM | {"optimizer": optimizer}, data=1, config=wide, **of).plan(
            gpu=str(card())
        )
        for name, of in places.items()
        for optimizer in ("adamw_8bit", "paged_adamw_8bit")
    }
    found = run_on_cards(save_and_resume, 1, plans, tmp_path, num_cards=1, timeout_seconds=400)[0]
    for name in places:
        plain, paged = (found[f"{optimizer} {name}"] for optimizer in ("adamw_8bit", "paged_adamw_8bit"))
        assert paged["straight"] == pytest.approx(plain["straight"], abs=1e-5)
        assert paged["resumed"] == pytest.approx(paged["straight"], abs=1e-5)
