"""Ranks that share rows by slices of their sequences train as one process of plain torch does, under every ZeRO stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from courses import (
    ADAM,
    BF16,
    CLOSE,
    LORA,
    NEAR,
    SGD,
    Case,
    Course,
    arguments_of,
    assert_follows_plain_torch,
    parameters,
    train_all,
    train_cases,
)
from ranks import run_distributed
from tiny_plans import step_batches, tiny_plan

import toolkit as tk
from toolkit.errors import RunError
from toolkit.modeling.build import build_model
from toolkit.modeling.loss import summed_cross_entropy
from toolkit.planning.plan import Plan

CHUNKED, AGAIN, TILES = {"loss": "chunked"}, {"gradient_checkpointing": True}, {"mlp_tiles": 3}
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
    made["tiles zero 2"] = Case(train=SGD | TILES, stage=2, data=2, context=1)
    made["tiles zero 3"] = Case(train=LORA | AGAIN | TILES, stage=3, data=2, context=1)
    made["checkpointing zero 3"] = Case(train=SGD | AGAIN, stage=3, architecture="qwen2", packing="none", context=2)
    made["lora checkpointing zero 3"] = Case(train=LORA | AGAIN | CHUNKED | TILES, stage=3, packing="none", context=2)
    made["window zero 2"] = Case(
        train=SGD | AGAIN, stage=2, architecture="mistral", config={"sliding_window": 3}, data=1, context=2
    )
    made["experts zero 2"] = Case(train=SGD, stage=2, architecture="qwen3_moe", data=1, context=2)
    made["tied zero 3"] = Case(train=SGD, stage=3, architecture="llama-tied", data=1, context=2)
    made["optimizer-cpu zero 2"] = Case(train=ADAM, stage=2, offload="optimizer-cpu", data=1, context=2, **CLOSE)
    made["qlora zero 2"] = Case(train=LORA | {"method": "qlora"}, stage=2, data=1, context=2)
    made["activations-cpu zero 2"] = Case(train=SGD | AGAIN, stage=2, offload="activations-cpu", data=1, context=2)
    made["smoothed zero 1"] = Case(train=SGD | {"z_loss": 1e-2}, stage=1, data=1, context=2)
    return made


CASES = cases()
# Over four ranks: one launch, with what else is claimed here.
DEFAULT = ("one key head zero 1", "lora checkpointing zero 3")


def plan_of(*, context: int, micro: int, accumulation: int) -> Plan:
    values = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": accumulation}
    return tiny_plan(ranks=4, train=ADAM | values, parallel={"context": context, "zero_stage": 2})


def hits(logits: torch.Tensor, labels: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    targets = labels[:, 1:]
    return {"hits": ((logits[:, :-1].argmax(-1) == targets).sum(), (targets != -100).sum())}


def refusal(run: Any, batches: list[dict[str, torch.Tensor]]) -> tuple[str, ...]:
    with pytest.raises(RunError) as caught:
        run.step(batches)
    return caught.value.codes


def other_claims(rank: int, root: str) -> dict[str, Any]:
    """Evaluations, outputs, refusals and checkpoints of four ranks that share rows by twos."""
    rows, found = step_batches(0, ranks=2), dict[str, Any]()
    plan = plan_of(context=2, micro=2, accumulation=2)
    dense = build_model(tiny_plan(train=ADAM, parallel={"zero_stage": 0}), device=torch.device("cpu")).eval()
    with torch.no_grad():
        scores = {id(batch): dense(input_ids=batch["input_ids"]).logits for batch in (*rows[0], *rows[1])}
    with tk.initialize(plan) as run:
        run.set_num_steps(10)
        own = rows[run.world.grid.row_group(rank)]
        found["different"] = refusal(run, rows[rank % 2])
        found["uneven"] = refusal(run, [{name: value[:, :15] for name, value in batch.items()} for batch in own])
        run.compute_metrics = hits
        found["evaluation"] = run.evaluate(own), run.metrics["eval_hits"]
        found["scores"] = max(
            float((outputs.logits - scores[id(batch)]).abs().max())
            for batch, (_, outputs) in zip(own, run.outputs(own), strict=True)
        )
        all_rows = [batch for group in rows for batch in group]
        summed = sum(float(summed_cross_entropy(scores[id(batch)], batch["labels"])) for batch in all_rows)
        right = [hits(scores[id(batch)], batch["labels"])["hits"] for batch in all_rows]
        count = sum(int(pair[1]) for pair in right)
        found["wanted"] = summed / count, sum(int(pair[0]) for pair in right) / count
        run.step(own)
        tk.save(run, Path(root) / "saved", probe=True)
        wanted = float(run.step(own))
    for context in (1, 4):
        dealt = [batch for group in rows for batch in group] if context == 1 else None
        plan = plan_of(context=context, micro=2, accumulation=4 * context // 4)
        with tk.initialize(plan) as run:
            tk.load(run, Path(root) / "saved")
            found[context] = float(run.step([dealt[rank]] if dealt is not None else all_rows)) - wanted
    return found


def together(rank: int, arguments: dict[str, tuple[Plan, str, int]], root: str) -> dict[str, Any]:
    return train_all(rank, arguments) | {"others": other_claims(rank, root)}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    root = tmp_path_factory.mktemp("context")
    cases = {name: CASES[name] for name in DEFAULT}
    results = run_distributed(together, 4, arguments_of(cases), str(root))
    told = {name: [rank[name] for rank in results] for name in (*cases, "others")}
    return told | {"folder": [root / "saved"]}


@pytest.fixture(scope="module")
def others() -> dict[str, list[Course | str]]:
    return train_cases(CASES, default=DEFAULT, others=True)


@pytest.mark.gloo
@pytest.mark.parametrize("name", parameters(CASES, default=DEFAULT))
def test_slices_train_as_plain_torch_does(name: str, request: pytest.FixtureRequest) -> None:
    results = request.getfixturevalue("found" if name in DEFAULT else "others")
    assert_follows_plain_torch(CASES[name], results[name])


@pytest.mark.gloo
def test_evaluations_and_outputs_are_those_of_whole_rows(found: dict[str, list[Any]]) -> None:
    for rank in found["others"]:
        assert rank["evaluation"] == pytest.approx(rank["wanted"], abs=1e-5)
        assert rank["scores"] < 1e-5


@pytest.mark.gloo
def test_batches_that_ranks_cannot_share_are_refused(found: dict[str, list[Any]]) -> None:
    for rank in found["others"]:
        assert rank["different"] == rank["uneven"] == ("CONTEXT_BATCH",)


@pytest.mark.gloo
def test_a_run_goes_on_with_other_slices_and_is_exported(found: dict[str, list[Any]], tmp_path: Path) -> None:
    for rank in found["others"]:
        assert abs(rank[1]) < 1e-5
        assert abs(rank[4]) < 1e-5
    tk.export(found["folder"][0], tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").exists()
