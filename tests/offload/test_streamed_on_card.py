"""On a card, streamed layers go on from a checkpoint as those do that stay there, in the memory that the estimate foresees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cards import card
from ranks import leave_group, run_on_cards
from tiny_plans import step_batches, tiny_plan

import toolkit as tk
from toolkit.launch.environment import ALLOCATOR

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(card() is None, reason="needs a CUDA device that computes in bf16")]

# Layers of 8.4 million weights, so that copies take longer than what queues them.
SHAPE = {"num_hidden_layers": 8, "hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8}
WAYS: dict[str, dict[str, Any]] = {
    "fp32": {"gradient_accumulation_steps": 2},
    "bf16": {"precision": "bf16", "gradient_accumulation_steps": 1},
    "bf16 half recomputed": {"precision": "bf16", "gradient_checkpointing": 0.5, "loss": "chunked"},
    "lora": {"precision": "bf16", "method": "lora", "lora": {"r": 4, "lora_alpha": 16}},
}
STAYS: dict[str, Any] = {"offload": "optimizer-cpu"}
STREAMED: dict[str, Any] = {"offload": "full-cpu", "offload_engine": "overlapped"}
SAVED, STEPS = 2, 6


def plan_of(way: str, parallel: dict[str, Any], gpu: str) -> Any:
    train = {"optimizer": "adamw_torch", "learning_rate": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.5}
    return tiny_plan(ranks=1, gpu=gpu, train=train | WAYS[way], parallel={"zero_stage": 2, **parallel}, config=SHAPE)


def go_on(run: Any) -> dict[str, Any]:
    accumulation = run.plan.settings.batch.accumulation
    losses = [
        float(run.step(step_batches(step, ranks=1, accumulation=accumulation)[0]))
        for step in range(run.step_count, STEPS)
    ]
    peaks = dict(run.memory.peaks)
    evaluated = run.evaluate(step_batches(99, ranks=1, accumulation=accumulation)[0])
    weights = [value.detach().float().cpu() for value in run.model.parameters()]
    return {"losses": losses, "evaluated": evaluated, "weights": weights, "peaks": peaks}


def train(rank: int, gpu: str, folder: str) -> dict[str, Any]:
    leave_group()
    found = {}
    for way in WAYS:
        place = Path(folder) / way.replace(" ", "-")
        with tk.initialize(plan_of(way, STAYS, gpu)) as run:
            for step in range(SAVED):
                run.step(step_batches(step, ranks=1, accumulation=run.plan.settings.batch.accumulation)[0])
            tk.save(run, place)
            found[way, "stays"] = go_on(run)
        with tk.initialize(plan_of(way, STREAMED, gpu)) as run:
            tk.load(run, place)
            found[way, "streamed"] = go_on(run)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    folder = str(tmp_path_factory.mktemp("saved"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTORCH_CUDA_ALLOC_CONF", ALLOCATOR)  # as a launch sets it, which the estimate takes for granted
        return run_on_cards(train, 1, str(card()), folder, num_cards=1, timeout_seconds=300)[0]  # type: ignore[no-any-return]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("way", WAYS)
def test_it_goes_on_as_layers_that_stay(found: dict[Any, Any], way: str) -> None:
    streamed, stays = found[way, "streamed"], found[way, "stays"]
    near = 1e-5 if way == "fp32" else 2e-3
    assert streamed["losses"] == pytest.approx(stays["losses"], rel=near)
    assert streamed["evaluated"] == pytest.approx(stays["evaluated"], rel=near)
    for one, another in zip(streamed["weights"], stays["weights"], strict=True):
        torch.testing.assert_close(one, another, rtol=0, atol=near)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("way", WAYS)
def test_the_card_takes_what_was_foreseen(found: dict[Any, Any], way: str) -> None:
    phases = tk.estimate(plan_of(way, STREAMED, str(card()))).ranks[0].phases
    for phase in ("init", "forward", "backward", "step"):
        foreseen = phases[phase].allocated_bytes
        assert found[way, "streamed"]["peaks"][phase] == pytest.approx(foreseen, rel=1e-3), phase
