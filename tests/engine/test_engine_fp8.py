"""Float8 products inside the real engine: under every ZeRO stage the course of plain torch, and no weight held in between."""

from __future__ import annotations

import gc
import json
from functools import cache
from typing import Any

import pytest
import torch
from cards import card
from ranks import leave_group, run_distributed
from tiny_plans import RANKS, step_batches, tiny_plan
from torch.nn import functional

import toolkit as tk
from toolkit.modeling.build import build_model
from toolkit.modeling.fp8 import fp8_layers
from toolkit.planning.plan import Plan

STEPS = 3
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_key_value_heads": 4}
FP8 = {"precision": "fp8", "optimizer": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.5}
LORA = {"method": "lora", "lora": {"r": 4, "lora_alpha": 16}}
RECOMPUTED = {"gradient_checkpointing": True}
ROWWISE = {"fp8": {"recipe": "rowwise"}}
HIGH = {"fp8": {"recipe": "rowwise_with_gw_hp"}}

# Train section, ZeRO stage, packing, offload.
CASES: dict[str, tuple[dict[str, Any], int, str, str]] = {
    **{f"zero {stage}": ({}, stage, "wrapped", "none") for stage in range(4)},
    "zero 2 rowwise": (ROWWISE, 2, "wrapped", "none"),
    "zero 3 rowwise_with_gw_hp": (HIGH, 3, "wrapped", "none"),
    "zero 2 checkpointing": (RECOMPUTED, 2, "wrapped", "none"),
    "zero 3 checkpointing": (RECOMPUTED, 3, "wrapped", "none"),
    "zero 1 fp32 sums": ({"gradient_accumulation_dtype": "fp32"}, 1, "wrapped", "none"),
    "zero 3 padded": ({}, 3, "none", "none"),
    "zero 3 full-cpu": (RECOMPUTED, 3, "wrapped", "full-cpu"),
    "zero 2 lora": (LORA, 2, "wrapped", "none"),
    "zero 3 lora checkpointing": (LORA | RECOMPUTED, 3, "wrapped", "none"),
}


def plan_of(name: str) -> Plan:
    train, stage, _, offload = CASES[name]
    # As large models have it: each weight gathered for its module and let go after it.
    zero = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 1}
    return tiny_plan(
        train=FP8 | train,
        parallel={"zero_stage": stage, "offload": offload},
        config=SIZES,
        deepspeed={"zero_optimization": zero} if stage == 3 else {},
    )


# ---- plain torch: a bf16 model with fp32 masters -----------------------------------------------------------------------


@cache
def reference(train_json: str, packing: str) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of one process that keeps an fp32 copy of what it trains."""
    train = json.loads(train_json)
    plan = tiny_plan(train=train | {"gradient_checkpointing": False}, parallel={"zero_stage": 0}, config=SIZES)
    model = build_model(plan, device=torch.device("cpu"))
    assert len(list(fp8_layers(model))) == 14
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    masters = [weight.detach().float().requires_grad_() for weight in trained]
    losses, norms = [], []
    for step in range(STEPS):
        batches = [batch for rank in step_batches(step, kind=packing) for batch in rank]
        count = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
        total = 0.0
        for master in masters:
            master.grad = torch.zeros_like(master)
        for batch in batches:
            logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
            labels = batch["labels"][:, 1:].flatten()
            loss = functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels, reduction="sum") / count
            model.zero_grad()
            loss.backward()
            total += float(loss.detach())
            for master, weight in zip(masters, trained, strict=True):
                master.grad += weight.grad.float()
        norms.append(float(torch.nn.utils.clip_grad_norm_(masters, train["max_grad_norm"])))
        losses.append(total)
        with torch.no_grad():
            for master, weight in zip(masters, trained, strict=True):
                weight.copy_(master.sub_(master.grad, alpha=train["learning_rate"]))
    return losses, norms


# ---- the engine --------------------------------------------------------------------------------------------------------


def copies_held(run: Any, batch: dict[str, torch.Tensor]) -> int:
    """Products of a forward pass that hold something else for the backward pass than the parameter that DeepSpeed releases."""
    own = {id(weight) for weight in run.model.parameters()}
    output = run.engine(input_ids=batch["input_ids"]).logits.sum()
    held: list[bool] = []
    pending, seen = [output.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        pending += [following for following, _ in node.next_functions]
        if "_Fp8Product" in node.name():
            held.append(id(node.saved_tensors[1]) not in own)
    assert len(held) == 14
    run.engine.backward(output * 0)
    run.engine.step()
    return sum(held)


def train_all(rank: int, plans: dict[str, Plan]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    leave_group()
    for name, plan in plans.items():
        losses, norms, packing = [], [], CASES[name][2]
        with tk.initialize(plan) as run:
            names = {weight for weight, _ in run.model.named_parameters()}
            for step in range(STEPS):
                losses.append(float(run.step(step_batches(step, kind=packing)[rank])))
                norms.append(run.gradient_norm)
            evaluated = run.evaluate(step_batches(9, kind=packing)[rank])
            is_plain = name in ("zero 2", "zero 3")
            held = copies_held(run, step_batches(0)[rank][0]) if is_plain else None
            count = len(list(fp8_layers(run.model)))
        found[name] = {
            "losses": losses, "norms": norms, "evaluated": evaluated, "held": held, "layers": count, "names": names,
        }  # fmt: skip
        gc.collect()
    return found


# Each recipe, kind of sums, adapters and the stages of DeepSpeed's three engines have a course without these.
REST = {
    "zero 0",
    "zero 1",
    "zero 2 rowwise",
    "zero 2 checkpointing",
    "zero 3 checkpointing",
    "zero 2 lora",
    "zero 3 padded",
    "zero 3 full-cpu",
}


@pytest.fixture(scope="module")
def courses() -> list[dict[str, Any]]:
    return run_distributed(train_all, RANKS, {name: plan_of(name) for name in CASES if name not in REST})


@pytest.fixture(scope="module")
def others() -> list[dict[str, Any]]:
    return run_distributed(train_all, RANKS, {name: plan_of(name) for name in sorted(REST)})


@pytest.mark.gloo
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full) if name in REST else name for name in CASES]
)
def test_trains_as_plain_torch_does(request: pytest.FixtureRequest, name: str) -> None:
    courses = request.getfixturevalue("others" if name in REST else "courses")
    train, _, packing, _ = CASES[name]
    told = {
        key: value
        for key, value in train.items()
        if key not in ("gradient_accumulation_dtype", "gradient_checkpointing")
    }
    losses, norms = reference(json.dumps(FP8 | told), packing)
    ours, theirs = (rank[name] for rank in courses)
    assert ours["losses"] == theirs["losses"]
    assert ours["losses"][0] == pytest.approx(losses[0], abs=1e-5), "the same weights, the same products"
    assert ours["norms"][0] == pytest.approx(norms[0], rel=1e-2)
    assert ours["losses"] == pytest.approx(losses, abs=8e-3)
    assert losses[0] - losses[-1] > 0.02
    assert max(norms) > FP8["max_grad_norm"] or "lora" in name, "clipping must act"
    assert ours["layers"] == 14
    assert ours["evaluated"] < losses[0] or "lora" in name


@pytest.mark.gloo
def test_no_gathered_weight_waits_for_the_backward_pass(courses: list[dict[str, Any]]) -> None:
    for stage in (2, 3):
        assert [rank[f"zero {stage}"]["held"] for rank in courses] == [0, 0]


@pytest.mark.gloo
def test_names_are_those_of_bf16(courses: list[dict[str, Any]]) -> None:
    plain = build_model(tiny_plan(train={"precision": "bf16"}, config=SIZES), device=torch.device("cpu"))
    assert courses[0]["zero 2"]["names"] == {name for name, _ in plain.named_parameters()}


# ---- on a card ---------------------------------------------------------------------------------------------------------


def has_float8() -> bool:
    return card() is not None and torch.cuda.get_device_capability() >= (8, 9)


def course_on_the_card(train: dict[str, Any]) -> tuple[list[float], dict[str, int], dict[str, int]]:
    """Losses of ten steps on one batch, and peaks by phase: measured and estimated."""
    values = {
        "sequence_length": 2048,
        "per_device_train_batch_size": 2,
        "gradient_checkpointing": False,
        "max_steps": 10,
    }
    values |= {"loss": "chunked", "learning_rate": 1e-4, "lr_scheduler_type": "constant", **train}
    job = {
        "model": {"name": "llama-3.2-1b", "init": "random"},
        "cluster": {"gpu": card()},
        "train": values,
        "parallel": {"zero_stage": 2},
    }
    plan = tk.resolve(tk.Job.model_validate(job))
    ids = torch.randint(0, 1000, (2, 2048), generator=torch.Generator().manual_seed(0))
    with tk.initialize(plan) as run:
        losses = [float(run.step([{"input_ids": ids, "labels": ids}])) for _ in range(10)]
        measured = dict(run.memory.peaks)
    del run
    gc.collect()
    torch.cuda.empty_cache()
    predicted = {name: phase.allocated_bytes for name, phase in tk.estimate(plan).ranks[0].phases.items()}
    return losses, measured, predicted


@pytest.mark.gpu
@pytest.mark.skipif(not has_float8(), reason="needs a card with float8 units")
def test_on_a_card_fp8_follows_bf16_in_the_memory_that_was_foreseen() -> None:
    expected, *_ = course_on_the_card({"precision": "bf16"})
    fall = expected[0] - expected[-1]
    assert fall > 1
    for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
        losses, measured, predicted = course_on_the_card({"precision": "fp8", "fp8": {"recipe": recipe}})
        assert losses == pytest.approx(expected, abs=0.05 * fall), recipe
        assert losses != expected
        for phase in ("forward", "backward", "step"):
            assert measured[phase] == pytest.approx(predicted[phase], rel=0.02), (recipe, phase)
