"""What must not change between a checkpoint and the plan that goes on from it, and what changes its layout, without a process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_plans import tiny_plan

from toolkit.checkpoint.compatibility import describe_layout, layout_changes, layout_problems
from toolkit.checkpoint.fingerprint import source_problems
from toolkit.config.job import Data
from toolkit.planning.plan import Plan


def _changes(tmp_path: Path, *, now: Plan, then: Plan, convert: bool = True) -> list[tuple[str, str]]:
    problems = [
        *layout_problems(now, then, tmp_path, convert=convert),
        *source_problems(now.job, then.job, {}, tmp_path),
    ]
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
def test_what_reorders_the_shards_is_another_layout(tmp_path: Path, name: str) -> None:
    before, after, key = SHARDS[name]
    then, now = tiny_plan(**before), tiny_plan(**after)
    for pair in ({"now": now, "then": then}, {"now": then, "then": now}):
        assert _changes(tmp_path, **pair, convert=False) == [("CHECKPOINT_LAYOUT", key)]
        assert _changes(tmp_path, **pair) == []
        assert [change.key for change in layout_changes(pair["now"], pair["then"])] == [key]
    assert _changes(tmp_path, now=now, then=now, convert=False) == []
    assert layout_changes(now, now) == []


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


def _messages(tmp_path: Path, *, now: Plan, then: Plan, convert: bool = False) -> list[str]:
    return [str(problem) for problem in layout_problems(now, then, tmp_path, convert=convert)]


def test_what_changes_the_layout_is_one_problem_where_none_may_be_read(tmp_path: Path) -> None:
    then = tiny_plan(ranks=4, parallel={"tensor": 2})
    now = tiny_plan(ranks=4, train={"gradient_accumulation_steps": 1})
    [message] = _messages(tmp_path, now=now, then=then)
    assert f"{tmp_path} has another layout (parallel.tensor 2 → 1)" in message
    assert "convert=False (--no-convert) forbids" in message
    assert "Leave out --no-convert, or set parallel.tensor to 2" in message
    # Half the ranks, each with the whole model: as many replicas, so the same batch.
    [message] = _messages(tmp_path, now=tiny_plan(ranks=2), then=then)
    assert "(cluster.gpus_per_node × cluster.nodes 4 → 2, parallel.tensor 2 → 1)" in message
    assert "or set cluster.gpus_per_node × cluster.nodes to 4 and parallel.tensor to 2" in message


def test_other_ranks_keep_the_global_batch(tmp_path: Path) -> None:
    two, four = tiny_plan(ranks=2), tiny_plan(ranks=4)
    assert _changes(tmp_path, now=four, then=two) == [("CHECKPOINT_DATA", "train.train_batch_size")]
    same = tiny_plan(ranks=4, train={"gradient_accumulation_steps": 1})
    assert _changes(tmp_path, now=same, then=two) == []
    assert describe_layout(same, two) == (
        "the checkpoint has another layout (cluster.gpus_per_node × cluster.nodes 2 → 4): its state is read weight by weight; "
        "other ranks: dropout draws anew from train.seed, the step and the rank's place"
    )
    assert describe_layout(two, two) is None


BF16_DDP = {"parallel": {"strategy": "ddp", "zero_stage": None}, "train": {"precision": "bf16"}}
HOOK = {"strategy": "ddp", "zero_stage": None, "ddp": {"comm_hook": "power_sgd", "power_sgd_start_step": 3}}
CANNOT: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "8 bit": (
        {"parallel": {"zero_stage": 2}, "train": {"optimizer": "adamw_8bit"}},
        {"parallel": {"zero_stage": 1}, "train": {"optimizer": "adamw_8bit"}},
        "8-bit states have a scale for each 256 numbers of a rank's part",
    ),
    "no fp32 copy": ({"train": {"precision": "bf16"}}, BF16_DDP, "ddp in 16 bit keeps no fp32 copy of the weights"),
    "hook": ({"parallel": HOOK}, {}, "a communication hook keeps on each rank what it has not sent yet"),
    "partial": (
        {"parallel": {"zero_stage": 3, "offload": "optimizer-cpu-partial", "offload_ratio": 0.5}},
        {"parallel": {"zero_stage": 3}},
        "optimizer-cpu-partial has two optimizers",
    ),
}


@pytest.mark.parametrize("name", CANNOT)
def test_what_cannot_go_over_exactly_is_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    then, now, reason = CANNOT[name]
    [message] = _messages(tmp_path, now=tiny_plan(**now), then=tiny_plan(**then), convert=True)
    assert f"to which it cannot go over exactly: {reason}" in message
    assert f"or export it (`toolkit export {tmp_path}`) and warm-start from the export. [CHECKPOINT_LAYOUT]" in message


def test_weights_that_were_trained_in_16_bit_alone_go_over(tmp_path: Path) -> None:
    assert _changes(tmp_path, now=tiny_plan(train={"precision": "bf16"}), then=tiny_plan(**BF16_DDP)) == []


STAGES: dict[str, Any] = {"ranks": 4, "config": {"num_hidden_layers": 4}}


def _staged(**parallel: Any) -> Plan:
    return tiny_plan(**STAGES, parallel={"zero_stage": 1, "pipeline": 2, **parallel})


INTERLEAVED = {"pipeline_schedule": "interleaved", "virtual_stages": 2}
KEEPS = {"gradient_accumulation_steps": 1}
OTHER_STAGES: dict[str, tuple[Plan, str]] = {
    "none": (tiny_plan(**STAGES, parallel={"zero_stage": 1}, train=KEEPS), "parallel.pipeline to 2"),
    "tensor ranks": (_staged(pipeline=1, tensor=2), "parallel.tensor to 1 and parallel.pipeline to 2"),
    "virtual": (_staged(**INTERLEAVED), "parallel.virtual_stages to 1"),
    "layers": (_staged(partition=[3, 1]), "parallel.partition to [2, 2]"),
}


@pytest.mark.parametrize("name", OTHER_STAGES)
def test_other_stages_are_another_layout(tmp_path: Path, name: str) -> None:
    now, fix = OTHER_STAGES[name]
    then = _staged()
    for pair in ({"now": now, "then": then}, {"now": then, "then": now}):
        assert [code for code, _ in _changes(tmp_path, **pair, convert=False)] == ["CHECKPOINT_LAYOUT"]
        assert _changes(tmp_path, **pair) == []
    [message] = _messages(tmp_path, now=now, then=then)
    assert f"or set {fix}. [CHECKPOINT_LAYOUT]" in message
    assert _changes(tmp_path, now=now, then=now, convert=False) == []


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
