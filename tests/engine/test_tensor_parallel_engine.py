"""Tensor and data parallelism together train as one process of plain torch does, under every ZeRO stage."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import tiny_models
from courses import (
    ADAM,
    BF16,
    CLOSE,
    LORA,
    NEAR,
    ROUTED,
    SGD,
    STEADY,
    SUMS,
    Case,
    Course,
    assert_follows_plain_torch,
    failures,
    parameters,
    reference,
    train_cases,
)
from ranks import run_distributed
from tiny_plans import step_batches

import toolkit as tk
from toolkit.planning.plan import Plan

TENSOR, RANKS, STEPS = 2, 4, 6
LORA_ON_HEAD = LORA | {"lora": {"r": 4, "target_modules": ["q_proj", "o_proj", "lm_head"]}}
LORA_ATTENTION = LORA | {"lora": {"r": 4, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}}
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
LORA_LATENT = LORA | {"lora": {"r": 4, "target_modules": LATENT}}
SHARED = {"num_key_value_heads": 1, "num_attention_heads": 4}


def cases() -> dict[str, Case]:
    made: dict[str, Case] = {}
    for stage in range(4):
        made[f"sgd zero {stage}"] = Case(train=SGD, stage=stage, steps=STEPS, tensor=TENSOR)
    for stage in (0, 3):
        made[f"adamw zero {stage}"] = Case(train=ADAM, stage=stage, tensor=TENSOR, **CLOSE)
    for stage in (1, 2, 3):
        made[f"bf16 zero {stage}"] = Case(train=SGD | BF16, stage=stage, tensor=TENSOR, **NEAR)
    for stage in (1, 3):  # DeepSpeed's BF16_Optimizer and stage 3
        made[f"bf16 fp32 sums zero {stage}"] = Case(train=SGD | SUMS, stage=stage, tensor=TENSOR, **NEAR)
    made["optimizer-cpu zero 2"] = Case(train=ADAM, stage=2, offload="optimizer-cpu", tensor=TENSOR, **CLOSE)
    for stage in (1, 3):
        made[f"lora zero {stage}"] = Case(train=LORA, stage=stage, tensor=TENSOR)
        made[f"lora fused zero {stage}"] = Case(
            train=LORA, stage=stage, architecture="gpt2", config=STEADY, tensor=TENSOR
        )
    made["lora on head zero 2"] = Case(train=LORA_ON_HEAD, stage=2, tensor=TENSOR)
    made["lora beside experts zero 2"] = Case(train=LORA_ATTENTION, stage=2, architecture="mixtral", tensor=TENSOR)
    made["lora shared heads zero 2"] = Case(train=LORA, stage=2, config=SHARED, tensor=TENSOR)
    made["shared heads zero 1"] = Case(train=SGD, stage=1, config=SHARED, tensor=TENSOR)
    for stage in (2, 3):
        made[f"experts zero {stage}"] = Case(
            train=SGD, stage=stage, architecture="mixtral", config=ROUTED, tensor=TENSOR
        )
        made[f"tied zero {stage}"] = Case(train=SGD, stage=stage, architecture="llama-tied", tensor=TENSOR)
        made[f"fused zero {stage}"] = Case(train=SGD, stage=stage, architecture="gpt2", config=STEADY, tensor=TENSOR)
        made[f"checkpointing zero {stage}"] = Case(
            train=SGD | {"gradient_checkpointing": True}, stage=stage, architecture="qwen2", tensor=TENSOR
        )
    pieces: dict[str, Any] = {"tensor": TENSOR, "sequence_parallel": True}
    for stage in range(4):
        made[f"sequence zero {stage}"] = Case(train=SGD, stage=stage, steps=STEPS, **pieces)
    for stage in (1, 3):
        made[f"sequence lora zero {stage}"] = Case(train=LORA, stage=stage, **pieces)
        made[f"sequence checkpointing zero {stage}"] = Case(
            train=SGD | {"gradient_checkpointing": True}, stage=stage, architecture="qwen2", **pieces
        )
    made["sequence lora fused zero 2"] = Case(train=LORA, stage=2, architecture="gpt2", config=STEADY, **pieces)
    made["sequence experts zero 2"] = Case(train=SGD, stage=2, architecture="mixtral", config=ROUTED, **pieces)
    made["lora shared heads zero 1"] = Case(train=LORA, stage=1, config=SHARED, tensor=TENSOR)
    made["shared heads zero 2"] = Case(train=SGD, stage=2, config=SHARED, tensor=TENSOR)
    made["fused zero 1"] = Case(train=SGD, stage=1, architecture="gpt2", config=STEADY, tensor=TENSOR)
    made["sequence fused zero 3"] = Case(train=SGD, stage=3, architecture="gpt2", config=STEADY, **pieces)
    made["sequence checkpointing zero 2"] = Case(
        train=SGD | {"gradient_checkpointing": True}, stage=2, architecture="qwen2", **pieces
    )
    made["full-cpu"] = Case(train=ADAM, stage=3, offload="full-cpu", tensor=TENSOR, **CLOSE)
    # Tables that are derived from the model: of latent attention, shared experts, sinks and experts with biases.
    for stage in (1, 2, 3):
        made[f"derived zero {stage}"] = Case(train=SGD, stage=stage, architecture="deepseek_v2", tensor=TENSOR)
    again = SGD | {"gradient_checkpointing": True}
    made["derived checkpointing zero 2"] = Case(train=again, stage=2, architecture="deepseek_v2", tensor=TENSOR)
    made["derived lora zero 2"] = Case(train=LORA_LATENT, stage=2, architecture="deepseek_v2", tensor=TENSOR)
    made["derived lora zero 3"] = Case(train=LORA_LATENT, stage=3, architecture="deepseek_v2", tensor=TENSOR)
    # Experts that are whole on their ranks.
    whole: dict[str, Any] = {"tensor": TENSOR, "experts": "whole"}
    for stage in range(4):
        made[f"whole experts with a router loss zero {stage}"] = Case(
            train=SGD,
            stage=stage,
            architecture="mixtral",
            config=ROUTED,
            steps=10,
            tolerance=1e-4,
            weight_tolerance=1e-4,
            **whole,
        )
    made["whole experts lora zero 3"] = Case(train=LORA_ATTENTION, stage=3, architecture="mixtral", **whole)
    made["whole experts derived zero 3"] = Case(train=again, stage=3, architecture="deepseek_v2", **whole)
    made["whole experts derived lora zero 2"] = Case(train=LORA_LATENT, stage=2, architecture="deepseek_v2", **whole)
    made["whole experts sequence with a router loss zero 2"] = Case(
        train=again, stage=2, architecture="mixtral", config=ROUTED, **pieces, experts="whole"
    )
    for stage in (0, 1, 2, 3):
        made[f"whole experts sequence zero {stage}"] = Case(
            train=again,
            stage=stage,
            architecture="mixtral",
            steps=10,
            tolerance=1e-4,
            weight_tolerance=1e-4,
            **pieces,
            experts="whole",
        )
    made["whole experts sequence lora zero 3"] = Case(
        train=LORA_ATTENTION, stage=3, architecture="mixtral", **pieces, experts="whole"
    )
    # Of tokens that choose fewer experts than there are ranks, which are sent where these are.
    for stage in range(4):
        made[f"whole experts dispatched zero {stage}"] = Case(
            train=again,
            stage=stage,
            architecture="mixtral",
            config={"num_experts_per_tok": 1},
            steps=10,
            tolerance=1e-4,
            weight_tolerance=1e-4,
            **pieces,
            experts="whole",
        )
    made["whole experts dispatched lora zero 3"] = Case(
        train=LORA_ATTENTION,
        stage=3,
        architecture="mixtral",
        config={"num_experts_per_tok": 1},
        **pieces,
        experts="whole",
    )
    made["whole experts zero 2"] = Case(train=again, stage=2, architecture="mixtral", **whole)
    made["padded zero 2"] = Case(train=SGD, stage=2, packing="none", architecture="qwen2", tensor=TENSOR)
    made["separated zero 1"] = Case(train=SGD, stage=1, packing="separated", architecture="qwen2", tensor=TENSOR)
    return made


CASES = cases()
# With those of the other engine tests, what test_default_courses.py asks for.
DEFAULT = (
    *("bf16 fp32 sums zero 1", "derived lora zero 2", "lora beside experts zero 2", "lora on head zero 2"),
    *("lora shared heads zero 2", "sequence fused zero 3", "sequence zero 0"),
    *("whole experts zero 2", "whole experts dispatched zero 3"),
)

# Of `tiny_models`: those whose styles are known.
ARCHITECTURES = [name for name in tiny_models.ARCHITECTURES if name != "deepseek_v2"]


def product_cases() -> dict[str, Case]:
    """Every architecture, stage, and way to lay out the sequence, with all weights and with adapters."""
    made: dict[str, Case] = {}
    for architecture, stage, pieces, train in itertools.product(ARCHITECTURES, range(4), (False, True), (SGD, LORA)):
        if "method" in train and architecture in ("mixtral", "olmoe", "qwen3_moe"):
            train = LORA_ATTENTION
        config = {"gpt2": STEADY, "opt": {"dropout": 0.0}}.get(architecture, {})
        if architecture == "falcon":
            config = {"multi_query": False}
        adapters = "lora" if "method" in train else "full"
        made[f"{architecture} zero {stage} {'pieces' if pieces else 'whole'} {adapters}"] = Case(
            train=train | ({"attention": "eager"} if architecture == "gemma2" else {}),
            stage=stage,
            architecture=architecture,
            config=config,
            tensor=TENSOR,
            sequence_parallel=pieces,
        )
    return made


@pytest.fixture(scope="module")
def courses() -> dict[str, list[Course | str]]:
    return train_cases(CASES, default=DEFAULT)


@pytest.fixture(scope="module")
def others() -> dict[str, list[Course | str]]:
    return train_cases(CASES, default=DEFAULT, others=True)


@pytest.mark.gloo
@pytest.mark.parametrize("name", parameters(CASES, default=DEFAULT))
def test_trains_as_plain_torch_does(request: pytest.FixtureRequest, name: str) -> None:
    found = request.getfixturevalue("courses" if name in DEFAULT else "others")
    assert_follows_plain_torch(CASES[name], found[name])


@pytest.mark.gloo
@pytest.mark.full
@pytest.mark.timeout(3600)
def test_every_architecture_trains_as_plain_torch_does() -> None:
    failed = failures(product_cases())
    assert not failed, "\n".join(failed)


def norms_of_a_step(rank: int, plans: list[Plan]) -> list[float | None]:
    norms = []
    for plan in plans:
        with tk.initialize(plan) as run:
            run.step(step_batches(0)[run.world.coordinate.dp])
            norms.append(run.gradient_norm)
    return norms


@pytest.mark.gloo
def test_what_the_refusal_of_stage_0_in_16_bit_spares() -> None:
    """The trap of TP_ZERO_STAGE: DeepSpeed's norm lacks the other rank's shards."""
    case = Case(train=SGD | BF16, stage=1, tensor=TENSOR)
    allowed = case.plan()
    refused = dataclasses.replace(allowed, settings=dataclasses.replace(allowed.settings, zero_stage=0))
    right, wrong = run_distributed(norms_of_a_step, RANKS, [allowed, refused])[0]
    assert right == pytest.approx(reference(case).norms[0], rel=0.02)
    assert wrong < 0.98 * right
