"""Pipelines beside tensor and data parallelism train as one process of plain torch does, under every schedule and ZeRO stage."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from courses import (
    ADAM,
    BF16,
    CLOSE,
    LORA,
    NEAR,
    SGD,
    STEADY,
    SUMS,
    Case,
    Course,
    arguments_of,
    assert_follows_plain_torch,
    failures,
    parameters,
    train_all,
    train_cases,
)
from ranks import run_distributed
from tiny_plans import step_batches

import toolkit as tk
from toolkit.pipeline_parallel.part import inner_model, stage_info

RANKS, STEPS = 4, 4
FOUR = {"num_hidden_layers": 4}
PAIR: dict[str, Any] = {"pipeline": 2, "data": 2, "micro_batches": 4, "config": FOUR}
DEEP: dict[str, Any] = {"pipeline": 4, "data": 1, "micro_batches": 6, "config": FOUR}
CUBE: dict[str, Any] = {"pipeline": 2, "data": 1, "tensor": 2, "micro_batches": 3, "config": FOUR}


def cases() -> dict[str, Case]:
    """Those of four ranks."""
    made: dict[str, Case] = {}
    for stage in (1, 2, 3):
        made[f"1f1b zero {stage}"] = Case(train=SGD, stage=stage, steps=STEPS, **PAIR)
        made[f"four stages zero {stage}"] = Case(train=SGD, stage=stage, **DEEP)
        made[f"beside tensor zero {stage}"] = Case(train=SGD, stage=stage, **CUBE)
        made[f"tied zero {stage}"] = Case(train=SGD, stage=stage, architecture="llama-tied", **PAIR)
        made[f"bf16 zero {stage}"] = Case(train=SGD | BF16, stage=stage, **PAIR, **NEAR)
        made[f"bf16 fp32 sums zero {stage}"] = Case(
            train=SGD | SUMS, stage=stage, architecture="llama-tied", **PAIR, **NEAR
        )
        made[f"lora zero {stage}"] = Case(train=LORA, stage=stage, **PAIR)
    made["gpipe zero 1"] = Case(train=SGD, stage=1, schedule="gpipe", **PAIR)
    made["gpipe zero 3"] = Case(train=SGD, stage=3, schedule="gpipe", **PAIR)
    interleaved: dict[str, Any] = {"schedule": "interleaved", "virtual_stages": 2}
    for stage in (1, 2, 3):
        made[f"interleaved zero {stage}"] = Case(train=SGD, stage=stage, **interleaved, **PAIR)
    made["interleaved tied"] = Case(train=SGD, stage=2, architecture="llama-tied", **interleaved, **PAIR)
    for stage, offload in ((2, "optimizer-cpu"), (3, "full-cpu")):
        made[f"interleaved {offload}"] = Case(train=ADAM, stage=stage, offload=offload, **interleaved, **PAIR, **CLOSE)
    few = LORA | {
        "max_grad_norm": 1e-4,
        "lora": {"r": 4, "lora_alpha": 16, "target_modules": r"model\.layers\.[01]\..*q_proj"},
    }
    made["few adapters zero 2"] = Case(train=few, stage=2, **interleaved, **PAIR)
    tied: dict[str, Any] = {"architecture": "llama-tied", **PAIR}
    made["tied optimizer-cpu"] = Case(train=ADAM, stage=2, offload="optimizer-cpu", **tied, **CLOSE)
    made["tied full-cpu"] = Case(train=ADAM, stage=3, offload="full-cpu", **tied, **CLOSE)
    made["adamw zero 2"] = Case(train=ADAM, stage=2, **PAIR, **CLOSE)
    made["adamw zero 3"] = Case(train=ADAM, stage=3, architecture="llama-tied", **PAIR, **CLOSE)
    made["optimizer-cpu zero 2"] = Case(train=ADAM, stage=2, offload="optimizer-cpu", **PAIR, **CLOSE)
    made["full-cpu zero 3"] = Case(train=ADAM, stage=3, offload="full-cpu", **PAIR, **CLOSE)
    made["activations-cpu zero 2"] = Case(
        train=SGD | {"gradient_checkpointing": True}, stage=2, offload="activations-cpu", **PAIR
    )
    made["checkpointing zero 1"] = Case(
        train=SGD | {"gradient_checkpointing": True}, stage=1, architecture="qwen2", **PAIR
    )
    made["checkpointing zero 3"] = Case(
        train=SGD | {"gradient_checkpointing": True}, stage=3, architecture="qwen2", **PAIR
    )
    made["padded zero 2"] = Case(train=SGD, stage=2, packing="none", architecture="qwen2", **PAIR)
    made["separated zero 3"] = Case(train=SGD, stage=3, packing="separated", architecture="qwen2", **PAIR)
    made["pieces zero 2"] = Case(train=SGD, stage=2, sequence_parallel=True, **CUBE)
    made["lora beside tensor zero 3"] = Case(train=LORA, stage=3, **CUBE)
    made["tied beside tensor zero 1"] = Case(train=SGD, stage=1, architecture="llama-tied", **CUBE)
    gpt2 = {**PAIR, "config": {**FOUR, **STEADY}}
    made["gpt2 zero 2"] = Case(train=SGD, stage=2, architecture="gpt2", **gpt2)
    split: dict[str, Any] = {"schedule": "zb-h1"}
    made["zb-h1 four stages"] = Case(
        train=SGD | {"gradient_checkpointing": True}, stage=1, architecture="llama-tied", **split, **DEEP
    )
    for name, virtual in (("zb-h1 beside tensor", 1), ("zb-h1 virtual beside tensor", 2)):
        made[name] = Case(
            train=SGD, stage=1, architecture="qwen2", sequence_parallel=True, virtual_stages=virtual, **split, **CUBE
        )
    made["zb-h1 virtual"] = Case(train=SGD, stage=1, architecture="gpt2", virtual_stages=2, **split, **gpt2)
    made["zb-h1 fp32 sums"] = Case(train=SGD | SUMS, stage=1, **split, **PAIR, **NEAR)
    made["gpt_neox zero 1"] = Case(train=SGD, stage=1, architecture="gpt_neox", **PAIR)
    made["gemma2 zero 2"] = Case(train=SGD | {"attention": "eager"}, stage=2, architecture="gemma2", **PAIR)
    made["qwen3 zero 3"] = Case(train=SGD, stage=3, architecture="qwen3", **PAIR)
    made["chunked zero 1"] = Case(train=SGD | {"loss": "chunked"}, stage=1, architecture="llama-tied", **PAIR)
    made["experts zero 2"] = Case(train=SGD, stage=2, architecture="mixtral", **PAIR)
    made["whole experts in pieces beside tensor"] = Case(
        train=SGD, stage=3, architecture="mixtral", experts="whole", sequence_parallel=True, **CUBE
    )
    made["whole experts beside tensor"] = Case(train=SGD, stage=2, architecture="mixtral", experts="whole", **CUBE)
    return made


def cubes() -> dict[str, Case]:
    """Those of eight ranks, each two of the three sizes at their largest."""
    sizes = {"4 x 2 x 1": (4, 1, 2), "4 x 1 x 2": (4, 2, 1), "2 x 2 x 2": (2, 2, 2)}
    return {
        f"{name} zero {stage}": Case(
            train=SGD,
            stage=stage,
            architecture="llama-tied",
            pipeline=pp,
            data=dp,
            tensor=tp,
            micro_batches=4,
            config=FOUR,
        )
        for stage, (name, (pp, dp, tp)) in enumerate(sizes.items(), start=1)
    }


CASES, CUBES = cases(), cubes()
CUBE_OF_TWOS = "2 x 2 x 2 zero 3"  # the only one of eight ranks with all three axes
FOUR_REPLICAS: dict[str, Any] = {"architecture": "llama-tied", "data": 4, "pipeline": 2, "config": FOUR, "steps": 2}
COPIES = {
    "bf16": Case(train=ADAM | BF16, stage=1, micro_batches=3, **FOUR_REPLICAS),
    "fp32 sums": Case(train=ADAM | SUMS, stage=2, micro_batches=3, **FOUR_REPLICAS),
}
# With those of the other engine tests, what test_default_courses.py asks for.
DEFAULT = (
    *("bf16 fp32 sums zero 1", "few adapters zero 2", "four stages zero 1"),
    *("gemma2 zero 2", "gpipe zero 3", "gpt_neox zero 1"),
    *("pieces zero 2", "qwen3 zero 3", "zb-h1 virtual beside tensor"),
)
ARCHITECTURES = ("llama", "llama-tied", "qwen2", "qwen3", "gemma2", "gpt2", "gpt_neox")


def product_cases() -> dict[str, Case]:
    """Every product of sizes up to eight ranks, ZeRO stage and architecture."""
    made: dict[str, Case] = {}
    sizes = [(pp, dp, tp) for pp, dp, tp in itertools.product((1, 2, 4), (1, 2), (1, 2)) if 1 < pp * dp * tp <= 8]
    for (pp, dp, tp), stage, architecture in itertools.product(sizes, (1, 2, 3), ARCHITECTURES):
        made[f"{architecture} {pp} x {dp} x {tp} zero {stage}"] = Case(
            train=SGD | ({"attention": "eager"} if architecture == "gemma2" else {}),
            stage=stage,
            architecture=architecture,
            config=FOUR | (STEADY if architecture == "gpt2" else {}),
            pipeline=pp,
            data=dp,
            tensor=tp,
            micro_batches=4,
        )
    return made


@pytest.fixture(scope="module")
def courses() -> dict[str, list[Course | str]]:
    return train_cases(CASES, default=DEFAULT)


@pytest.fixture(scope="module")
def others() -> dict[str, list[Course | str]]:
    return train_cases(CASES, default=DEFAULT, others=True)


@pytest.fixture(scope="module")
def eight() -> list[dict[str, Any]]:
    return run_distributed(
        train_eight, 2 * RANKS, arguments_of({CUBE_OF_TWOS: CUBES[CUBE_OF_TWOS]}), timeout_seconds=1200
    )


@pytest.fixture(scope="module")
def flat() -> list[dict[str, Any]]:
    """The courses of cubes of eight ranks, one of whose sizes is 1."""
    chosen = {name: case for name, case in CUBES.items() if name != CUBE_OF_TWOS}
    return run_distributed(train_all, 2 * RANKS, arguments_of(chosen), timeout_seconds=1200)


@pytest.fixture(scope="module")
def rounded() -> list[dict[str, Any]]:
    return run_distributed(copies_after, 2 * RANKS, ("fp32 sums",))


def train_eight(rank: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return train_all(rank, arguments) | copies_after(rank, ("bf16",))


def copies_after(rank: int, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: copy_after(COPIES[name]) for name in names}


def copy_after(case: Case) -> Any:
    """This rank's copy of a tied weight after some steps, as numpy; None on a rank without one."""
    plan = case.plan()
    with tk.initialize(plan) as run:
        for step in range(case.steps):
            batches = step_batches(step, ranks=case.data, accumulation=case.micro_batches)
            run.step(batches[run.world.coordinate.dp])
        info = stage_info(run.model)
        assert info is not None
        if info.tied_key is None:
            return None
        return inner_model(run.model).get_parameter(info.tied_key).detach().float().numpy().copy()


@pytest.mark.gloo
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", parameters(CASES, default=DEFAULT))
def test_trains_as_plain_torch_does(request: pytest.FixtureRequest, name: str) -> None:
    found = request.getfixturevalue("courses" if name in DEFAULT else "others")
    assert_follows_plain_torch(CASES[name], found[name])


@pytest.mark.gloo
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", parameters(COPIES, default=()))
def test_both_copies_of_a_tied_weight_stay_one(request: pytest.FixtureRequest, name: str) -> None:
    """Rounded sums of four depend on their order, in which the two stages reduce differently."""
    found = request.getfixturevalue("eight" if name == "bf16" else "rounded")
    copies = [rank[name] for rank in found if rank[name] is not None]
    assert len(copies) == 2 * RANKS
    assert all((copy == copies[0]).all() for copy in copies)


@pytest.mark.gloo
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", parameters(CUBES, default=()))
def test_three_axes_train_as_plain_torch_does(request: pytest.FixtureRequest, name: str) -> None:
    found = request.getfixturevalue("eight" if name == CUBE_OF_TWOS else "flat")
    assert_follows_plain_torch(CUBES[name], [rank[name] for rank in found])


@pytest.mark.gloo
@pytest.mark.full
@pytest.mark.timeout(5400)
def test_every_product_trains_as_plain_torch_does() -> None:
    chosen, failed = product_cases(), []
    for ranks in (2, 4, 8):
        failed += failures({name: case for name, case in chosen.items() if case.ranks == ranks})
    assert not failed, "\n".join(failed)
