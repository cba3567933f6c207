"""What must not change between a checkpoint and the plan that goes on from it, without a process being started."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_plans import tiny_plan

from toolkit.checkpoint.compatibility import layout_problems
from toolkit.checkpoint.fingerprint import source_problems
from toolkit.config.job import Data
from toolkit.planning.plan import Plan


def _changes(tmp_path: Path, *, now: Plan, then: Plan) -> list[tuple[str, str]]:
    problems = [*layout_problems(now, then, tmp_path), *source_problems(now.job, then.job, {}, tmp_path)]
    return [(problem.code, problem.key or "") for problem in problems]


def _zero(**values: Any) -> dict[str, Any]:
    return {"deepspeed": {"zero_optimization": values}}


BF16 = {"precision": "bf16", "gradient_accumulation_dtype": "bf16"}
SHARDS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "round robin": ({}, _zero(round_robin_gradients=True), "deepspeed.zero_optimization.round_robin_gradients"),
    "sub-groups": (
        {"parallel": {"zero_stage": 3}},
        {"parallel": {"zero_stage": 3}, **_zero(sub_group_size=1000)},
        "deepspeed.zero_optimization.sub_group_size",
    ),
    "accumulation, stage 1": (
        {"parallel": {"zero_stage": 1}, "train": BF16},
        {"parallel": {"zero_stage": 1}, "train": {**BF16, "gradient_accumulation_dtype": "fp32"}},
        "train.gradient_accumulation_dtype",
    ),
    "accumulation, stage 2": (
        {"train": BF16},
        {"train": {**BF16, "gradient_accumulation_dtype": "fp32"}},
        "train.gradient_accumulation_dtype",
    ),
}


@pytest.mark.parametrize("name", SHARDS)
def test_what_silently_reorders_the_shards(tmp_path: Path, name: str) -> None:
    before, after, key = SHARDS[name]
    then, now = tiny_plan(**before), tiny_plan(**after)
    assert _changes(tmp_path, now=now, then=then) == [("CHECKPOINT_LAYOUT", key)]
    assert _changes(tmp_path, now=then, then=now) == [("CHECKPOINT_LAYOUT", key)]
    assert _changes(tmp_path, now=now, then=now) == []


def test_float8_is_not_in_what_is_saved(tmp_path: Path) -> None:
    fp8, bf16, fp32 = (tiny_plan(train={"precision": precision}) for precision in ("fp8", "bf16", "fp32"))
    assert _changes(tmp_path, now=fp8, then=fp8) == []
    assert _changes(tmp_path, now=fp8, then=bf16) == _changes(tmp_path, now=bf16, then=fp8) == []
    assert _changes(tmp_path, now=fp8, then=fp32) == [("CHECKPOINT_LAYOUT", "train.precision")]


def test_what_is_off_anyway_may_be_written_out(tmp_path: Path) -> None:
    assert _changes(tmp_path, now=tiny_plan(**_zero(round_robin_gradients=False)), then=tiny_plan()) == []


def _reads(plan: Plan, *, tokenizer: str | None = None, **data: Any) -> Plan:
    model = plan.job.model.model_copy(update={"tokenizer": tokenizer})
    job = plan.job.model_copy(update={"model": model, "data": Data.model_validate({"train": "a.jsonl", **data})})
    return replace(plan, job=job)


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"train": "b.jsonl"}, "data.train"),
        ({"train": ("a.jsonl", "b.jsonl")}, "data.train"),
        ({"eval": "c.jsonl"}, "data.eval"),
        ({"tokenizer": "other"}, "model.tokenizer"),
    ],
)
def test_what_makes_a_position_mean_other_documents(tmp_path: Path, changed: dict[str, Any], key: str) -> None:
    plan = tiny_plan()
    assert _changes(tmp_path, now=_reads(plan, **changed), then=_reads(plan)) == [("CHECKPOINT_DATA", key)]
    assert _changes(tmp_path, now=_reads(plan, **changed), then=_reads(plan, **changed)) == []


def test_a_list_of_one_file_is_that_file(tmp_path: Path) -> None:
    plan = tiny_plan()
    assert _changes(tmp_path, now=_reads(plan, train=("a.jsonl",)), then=_reads(plan)) == []


def _messages(tmp_path: Path, *, now: Plan, then: Plan) -> list[str]:
    return [str(problem) for problem in layout_problems(now, then, tmp_path)]


def test_another_tensor_size_is_one_problem(tmp_path: Path) -> None:
    then, now = tiny_plan(ranks=4, parallel={"tensor": 2}), tiny_plan(ranks=4)
    assert _changes(tmp_path, now=now, then=then) == [("CHECKPOINT_LAYOUT", "parallel.tensor")]
    assert _changes(tmp_path, now=then, then=now) == [("CHECKPOINT_LAYOUT", "parallel.tensor")]
    assert _changes(tmp_path, now=then, then=then) == []
    [message] = _messages(tmp_path, now=now, then=then)
    assert f"parallel.tensor=1, but {tmp_path} was saved with 2" in message
    assert f"Set parallel.tensor to 2 to resume, or export it (`toolkit export {tmp_path}`) and warm-start" in message


def test_ranks_and_tensor_size_that_change_together_are_one_problem(tmp_path: Path) -> None:
    then, now = tiny_plan(ranks=4, parallel={"tensor": 2}), tiny_plan(ranks=2)
    [message] = _messages(tmp_path, now=now, then=then)
    assert (
        f"cluster.gpus_per_node × cluster.nodes=2 and parallel.tensor=1, but {tmp_path} was saved with 4 and 2"
        in message
    )
    assert "Set cluster.gpus_per_node × cluster.nodes to 4 and parallel.tensor to 2 to resume" in message


def test_a_batch_that_follows_from_the_ranks_is_not_told_beside_them(tmp_path: Path) -> None:
    two, four = tiny_plan(ranks=2), tiny_plan(ranks=4)
    ranks = ("CHECKPOINT_LAYOUT", "cluster.gpus_per_node × cluster.nodes")
    assert _changes(tmp_path, now=four, then=two) == [ranks]
    larger = tiny_plan(ranks=4, train={"per_device_train_batch_size": 3})
    assert _changes(tmp_path, now=larger, then=two) == [ranks, ("CHECKPOINT_DATA", "train.train_batch_size")]


STAGES: dict[str, Any] = {"ranks": 4, "config": {"num_hidden_layers": 4}}


def _staged(**parallel: Any) -> Plan:
    return tiny_plan(**STAGES, parallel={"zero_stage": 1, "pipeline": 2, **parallel})


INTERLEAVED = {"pipeline_schedule": "interleaved", "virtual_stages": 2}
OTHER_STAGES: dict[str, tuple[Plan, str, str]] = {
    "none": (_staged(pipeline=1), "parallel.pipeline", "Set parallel.pipeline to 2 to resume"),
    "four": (_staged(pipeline=4), "parallel.pipeline", "Set parallel.pipeline to 2 to resume"),
    "tensor ranks": (
        _staged(pipeline=1, tensor=2),
        "parallel.pipeline",
        "Set parallel.tensor to 1 and parallel.pipeline to 2 to resume",
    ),
    "virtual": (_staged(**INTERLEAVED), "parallel.virtual_stages", "Set parallel.virtual_stages to 1 to resume"),
    "layers": (_staged(partition=[3, 1]), "parallel.partition", "Set parallel.partition to [2, 2] to resume"),
}


@pytest.mark.parametrize("name", OTHER_STAGES)
def test_other_stages_are_one_problem(tmp_path: Path, name: str) -> None:
    now, key, fix = OTHER_STAGES[name]
    then = _staged()
    assert _changes(tmp_path, now=now, then=then) == [("CHECKPOINT_LAYOUT", key)]
    [message] = _messages(tmp_path, now=now, then=then)
    assert f"{fix}, or export it (`toolkit export {tmp_path}`) and warm-start" in message
    assert _changes(tmp_path, now=then, then=now) == [("CHECKPOINT_LAYOUT", key)]
    assert _changes(tmp_path, now=now, then=now) == []


def test_the_order_of_the_passes_and_the_dtype_of_sums_over_stages_may_change(tmp_path: Path) -> None:
    then, now = _staged(pipeline_schedule="1f1b"), _staged(pipeline_schedule="gpipe")
    assert _changes(tmp_path, now=now, then=then) == []
    sums = [
        tiny_plan(
            **STAGES, parallel={"zero_stage": 1, "pipeline": 2}, train={**BF16, "gradient_accumulation_dtype": dtype}
        )
        for dtype in ("bf16", "fp32")
    ]
    assert _changes(tmp_path, now=sums[0], then=sums[1]) == []
