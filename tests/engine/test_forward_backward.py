"""The engine trains as one process of plain torch does: losses, gradient norms and weights, step by step."""

from __future__ import annotations

from typing import Any

import pytest
from courses import (
    ADAM,
    ADAPTERS,
    BF16,
    CLOSE,
    LORA,
    NEAR,
    ROUTED,
    SGD,
    SUMS,
    Case,
    Course,
    arguments_of,
    largest_difference,
    parameters,
    reference,
    train_all,
)
from ranks import run_distributed
from tiny_plans import RANKS

from toolkit.modeling import linear_cross_entropy
from toolkit.planning.plan import Plan

STEPS = 6
LORA_HEAD = LORA | {"lora": {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}}
LORA_ON_HEAD = LORA | {"lora": {"r": 4, "target_modules": ["q_proj", "lm_head"]}}
CHUNKED = {"loss": "chunked"}
CAPPED = {"final_logit_softcapping": 2.0}


def cases() -> dict[str, Case]:
    made: dict[str, Case] = {}
    for stage in range(4):
        made[f"sgd zero {stage}"] = Case(train=SGD, stage=stage, steps=STEPS)
        made[f"adamw zero {stage}"] = Case(train=ADAM, stage=stage, steps=STEPS, **CLOSE)
    for stage in (2, 3):
        made[f"lora sgd zero {stage}"] = Case(train=LORA, stage=stage)
        made[f"experts zero {stage}"] = Case(train=SGD, stage=stage, architecture="mixtral", config=ROUTED)
    for stage in (1, 2, 3):
        made[f"bf16 zero {stage}"] = Case(train=SGD | BF16, stage=stage, **NEAR)
        made[f"bf16 fp32 sums zero {stage}"] = Case(train=SGD | SUMS, stage=stage, **NEAR)
        made[f"optimizer-cpu zero {stage}"] = Case(train=ADAM, stage=stage, offload="optimizer-cpu", **CLOSE)
    made["separated zero 3"] = Case(train=SGD, stage=3, packing="separated", architecture="qwen2")
    made["padded zero 2"] = Case(train=SGD, stage=2, packing="none", architecture="qwen2")
    made["lora adamw zero 3"] = Case(train=ADAM | ADAPTERS, stage=3, **CLOSE)
    made["lora and head zero 3"] = Case(train=LORA_HEAD, stage=3)
    made["lora experts zero 3"] = Case(train=LORA, stage=3, architecture="mixtral")
    for stage in (0, 1, 2, 3):
        made[f"chunked loss zero {stage}"] = Case(train=SGD | CHUNKED, stage=stage)
    for stage in (1, 3):
        made[f"chunked loss tied zero {stage}"] = Case(train=SGD | CHUNKED, stage=stage, architecture="llama-tied")
        made[f"chunked loss experts zero {stage}"] = Case(
            train=SGD | CHUNKED, stage=stage, architecture="mixtral", config=ROUTED
        )
        made[f"chunked loss lora on head zero {stage}"] = Case(train=LORA_ON_HEAD | CHUNKED, stage=stage)
        made[f"chunked loss bf16 zero {stage}"] = Case(train=SGD | BF16 | CHUNKED, stage=stage, **NEAR)
    made["chunked loss capped zero 3"] = Case(
        train=SGD | CHUNKED | {"attention": "eager"}, stage=3, architecture="gemma2", config=CAPPED
    )
    made["chunked loss lora zero 3"] = Case(train=LORA | CHUNKED, stage=3)
    made["chunked loss checkpointing full-cpu"] = Case(
        train=ADAM | CHUNKED | {"gradient_checkpointing": True}, stage=3, offload="full-cpu", **CLOSE
    )
    made["chunked loss lora and head zero 3"] = Case(train=LORA_HEAD | CHUNKED, stage=3)
    made["experts zero 1"] = Case(train=SGD, stage=1, architecture="mixtral", config=ROUTED)
    made["chunked loss experts zero 2"] = Case(train=SGD | CHUNKED, stage=2, architecture="mixtral", config=ROUTED)
    made["chunked loss lora adamw zero 2"] = Case(train=ADAM | ADAPTERS | CHUNKED, stage=2, **CLOSE)
    made["full-cpu"] = Case(train=ADAM, stage=3, offload="full-cpu", **CLOSE)
    made["activations-cpu zero 3"] = Case(
        train=SGD | {"gradient_checkpointing": True}, stage=3, offload="activations-cpu"
    )
    return made


CASES = cases()
# With those of the other engine tests, what test_default_courses.py asks for.
DEFAULT = (
    *("activations-cpu zero 3", "bf16 fp32 sums zero 1", "chunked loss capped zero 3"),
    *("chunked loss checkpointing full-cpu", "chunked loss lora on head zero 1", "chunked loss zero 0"),
    *("experts zero 2", "lora and head zero 3", "optimizer-cpu zero 1"),
    *("padded zero 2", "separated zero 3"),
)


def train_in_blocks(rank: int, plans: dict[str, tuple[Plan, str, int]]) -> dict[str, Any]:
    # Several blocks of the vocabulary and several chunks of tokens, small as the model is.
    linear_cross_entropy.LEAST_ROWS, linear_cross_entropy.BLOCK_ELEMENTS = 8, 640
    return train_all(rank, plans)


@pytest.fixture(scope="module")
def courses() -> list[dict[str, Any]]:
    return run_distributed(train_in_blocks, RANKS, arguments_of({name: CASES[name] for name in DEFAULT}))


@pytest.fixture(scope="module")
def others() -> list[dict[str, Any]]:
    chosen = {name: case for name, case in CASES.items() if name not in DEFAULT}
    return run_distributed(train_in_blocks, RANKS, arguments_of(chosen))


def course_of(courses: list[dict[str, Any]], rank: int, name: str) -> Course:
    course = courses[rank][name]
    if isinstance(course, str):
        pytest.fail(course)
    return course


@pytest.mark.gloo
@pytest.mark.parametrize("name", parameters(CASES, default=DEFAULT))
def test_trains_as_plain_torch_does(request: pytest.FixtureRequest, name: str) -> None:
    found = request.getfixturevalue("courses" if name in DEFAULT else "others")
    case, expected = CASES[name], reference(CASES[name])
    ours, theirs = (course_of(found, rank, name) for rank in range(RANKS))
    assert ours.losses == theirs.losses
    assert ours.norms == pytest.approx(theirs.norms, rel=1e-6)
    assert ours.losses == pytest.approx(expected.losses, abs=case.tolerance)
    assert ours.norms == pytest.approx(expected.norms, abs=case.tolerance)
    assert largest_difference(ours.first, expected.first) < case.weight_tolerance
    assert largest_difference(ours.last, expected.last) < case.weight_tolerance
    assert max(expected.norms) > case.train["max_grad_norm"], "clipping must act"
    assert expected.losses[0] - expected.losses[-1] > case.tolerance
    moved = {name: weight for name, weight in expected.last.items() if abs(weight - expected.first[name]).max() > 0}
    assert "lora" in name or moved.keys() == expected.last.keys()
