"""Every key of a job has a row that says what a resume makes of it, and each row does what it says."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tiny_plans import tiny_plan

from toolkit.checkpoint.compatibility import changes, describe_changes, describe_layout, layout_problems, rule_of
from toolkit.checkpoint.resume_rules import RULES
from toolkit.cli.keys import describe_keys
from toolkit.deepspeed_spec.job_section import job_keys
from toolkit.planning.plan import Plan

DEEPSPEED = [f"deepspeed.{path}" for path in job_keys()]
LEAVES = [key.path for key in describe_keys() if key.values != "section"] + [
    key for key in DEEPSPEED if not any(other.startswith(f"{key}.") for other in DEEPSPEED)
]


def test_every_key_of_the_schema_has_a_row() -> None:
    missing = []
    for key in LEAVES:
        try:
            rule_of(key)
        except KeyError:
            missing.append(key)
    assert missing == [], "say in toolkit/checkpoint/resume_rules.py what a resume makes of them"


def test_every_row_is_of_a_key() -> None:
    assert set(RULES) <= {*LEAVES, *DEEPSPEED}


BF16, FP8 = {"precision": "bf16"}, {"precision": "fp8"}
FP16 = {"gpu": "h100-sxm-80gb", "train": {"precision": "fp16"}}
LORA = {"method": "lora", "lora": {"r": 4}}
SGD = {"optimizer": "sgd", "momentum": 0.5}
STAGES = {"zero_stage": 1, "pipeline": 2}


def _lora(**values: Any) -> dict[str, Any]:
    return {"train": {"method": "lora", "lora": {"r": 4, **values}}}


def _torch(strategy: str, **section: Any) -> dict[str, Any]:
    return {"parallel": {"strategy": strategy, "zero_stage": None, **section}}


def _zero(**values: Any) -> dict[str, Any]:
    return {"deepspeed": {"zero_optimization": values}}


def _data(**values: Any) -> Any:
    then, now = ({key: pair[at] for key, pair in values.items()} for at in (0, 1))
    return {"data": {"train": "a.jsonl", **then}}, {"data": {"train": "a.jsonl", **now}}


# Key -> what the checkpoint's job says, and the job that goes on. Of keys told, then of keys refused.
Pair = tuple[dict[str, Any], dict[str, Any]]
TOLD: dict[str, Pair] = {
    "train.learning_rate": ({"train": {"learning_rate": 1e-5}}, {"train": {"learning_rate": 5e-4}}),
    "train.lr_scheduler_type": (
        {"train": {"warmup_steps": 0}},
        {"train": {"lr_scheduler_type": "linear", "warmup_steps": 0}},
    ),
    "train.min_learning_rate_ratio": tuple(
        {"train": {"lr_scheduler_type": "cosine_with_min_lr", "min_learning_rate_ratio": ratio}} for ratio in (0.1, 0.2)
    ),
    "train.warmup_steps": tuple({"train": {"lr_scheduler_type": "linear", "warmup_steps": n}} for n in (1, 2)),
    "train.warmup_ratio": tuple({"train": {"lr_scheduler_type": "linear", "warmup_ratio": n}} for n in (0.1, 0.2)),
    "train.max_steps": ({}, {"train": {"max_steps": 30}}),
    "train.num_train_epochs": tuple({"train": {"max_steps": None, "num_train_epochs": n}} for n in (1, 2)),
    "train.weight_decay": tuple({"train": {"weight_decay": decay}} for decay in (0.1, 0.2)),
    "train.adam_beta1": ({}, {"train": {"adam_beta1": 0.8}}),
    "train.adam_beta2": ({}, {"train": {"adam_beta2": 0.8}}),
    "train.adam_epsilon": ({}, {"train": {"adam_epsilon": 1e-6}}),
    "train.momentum": ({"train": SGD}, {"train": {**SGD, "momentum": 0.9}}),
    "train.max_grad_norm": ({}, {"train": {"max_grad_norm": 0.0}}),
    "train.precision": ({"train": BF16}, {"train": FP8}),
    "train.fp8.recipe": ({"train": FP8}, {"train": {**FP8, "fp8": {"recipe": "rowwise"}}}),
    "train.gradient_accumulation_dtype": tuple(
        {
            "ranks": 4,
            "config": {"num_hidden_layers": 4},
            "parallel": STAGES,
            "train": {**BF16, "gradient_accumulation_dtype": kind},
        }
        for kind in ("bf16", "fp32")
    ),
    "train.gradient_checkpointing": ({}, {"train": {"gradient_checkpointing": True}}),
    "train.gradient_checkpointing.keep": (
        {"train": {"gradient_checkpointing": True}},
        {"train": {"gradient_checkpointing": {"keep": ["linear"]}}},
    ),
    "train.attention": ({}, {"train": {"attention": "eager"}}),
    "train.loss": ({}, {"train": {"loss": "chunked"}}),
    "train.torch_compile": ({}, {"train": {"torch_compile": True}}),
    "train.save_steps": ({}, {"train": {"save_steps": 3}}),
    "train.save_total_limit": ({}, {"train": {"save_total_limit": 3}}),
    "train.save_only_model": ({}, {"train": {"save_only_model": True}}),
    "data.eval": tuple(
        {"data": {"train": "a.jsonl", "eval": {"few": {"path": "b.jsonl", "max_rows": rows}}}} for rows in (2, 3)
    ),
    "train.logging_steps": ({}, {"train": {"logging_steps": 3}}),
    "train.callbacks": ({}, {"train": {"callbacks": ["hooks:Mine"]}}),
    "train.report_to": ({}, {"train": {"report_to": ["tensorboard"]}}),
    "train.lora.lora_dropout": (_lora(), _lora(lora_dropout=0.1)),
    "parallel.pipeline_schedule": tuple(
        {"ranks": 4, "config": {"num_hidden_layers": 4}, "parallel": {**STAGES, "pipeline_schedule": name}}
        for name in ("1f1b", "gpipe")
    ),
    "parallel.ddp.bucket_cap_mb": tuple(_torch("ddp", ddp={"bucket_cap_mb": size}) for size in (10, 50)),
    "parallel.fsdp2.dp_replicate_size": (_torch("fsdp2"), _torch("fsdp2", fsdp2={"dp_replicate_size": 2})),
    "parallel.fsdp2.reshard_after_forward": (
        _torch("fsdp2"),
        _torch("fsdp2", fsdp2={"reshard_after_forward": False}),
    ),
    "deepspeed.zero_optimization.overlap_comm": ({}, _zero(overlap_comm=True)),
    "deepspeed.wall_clock_breakdown": ({}, {"deepspeed": {"wall_clock_breakdown": True}}),
}
REFUSED: dict[str, Pair] = {
    "model.added_tokens": tuple({"model": {"added_tokens": [name]}} for name in ("<a>", "<b>")),
    "data.system_prompt": _data(system_prompt=("Be long.", "Be brief.")),
    "data.long_rows": _data(long_rows=("split", "drop")),
    "data.streaming": _data(streaming=(False, True)),
    "data.shuffle_buffer": _data(streaming=(True, True), shuffle_buffer=(5, 6)),
    "data.group_by_length": _data(packing=("none", "none"), group_by_length=(False, True)),
    "data.preprocess": _data(preprocess=("my_records:all", "my_records:kept")),
    "data.sources": (
        {"data": {"sources": [{"path": "a.jsonl"}]}},
        {"data": {"sources": [{"path": "a.jsonl", "weight": 2.0, "max_rows": 3}]}},
    ),
    "train.method": ({}, {"train": {"method": "lora"}}),
    "train.optimizer": ({}, {"train": {"optimizer": "adamw_torch"}}),
    "train.momentum": ({"train": SGD}, {"train": {"optimizer": "sgd"}}),
    "train.precision": ({"train": BF16}, {}),
    "train.sequence_length": ({}, {"train": {"sequence_length": 8}}),
    "train.seed": ({}, {"train": {"seed": 1}}),
    "train.train_batch_size": ({}, {"train": {"gradient_accumulation_steps": 1}}),
    "train.lora.r": (_lora(), _lora(r=8)),
    "train.lora.lora_alpha": (_lora(), _lora(lora_alpha=8)),
    "train.lora.use_rslora": (_lora(), _lora(use_rslora=True)),
    "train.lora.target_modules": (_lora(), _lora(target_modules=["q_proj"])),
    "train.lora.modules_to_save": (_lora(), _lora(modules_to_save=["lm_head"])),
    "deepspeed.fp16.hysteresis": (FP16, {**FP16, "deepspeed": {"fp16": {"hysteresis": 4}}}),
}
CONVERTED: dict[str, Pair] = {
    "cluster.gpus_per_node": ({}, {"ranks": 1, "train": {"gradient_accumulation_steps": 4}}),
    "parallel.zero_stage": ({}, {"parallel": {"zero_stage": 1}}),
    "parallel.strategy": (_torch("ddp"), _torch("fsdp2")),
    "train.weight_decay": ({}, {"train": {"weight_decay": 0.1}}),
    "train.gradient_accumulation_dtype": tuple(
        {"train": {**BF16, "gradient_accumulation_dtype": kind}} for kind in ("bf16", "fp32")
    ),
    "parallel.offload": ({}, {"parallel": {"offload": "optimizer-cpu"}}),
    "deepspeed.zero_optimization.round_robin_gradients": ({}, _zero(round_robin_gradients=True)),
    "deepspeed.zero_optimization.sub_group_size": tuple(
        {"parallel": {"zero_stage": 3}, **_zero(sub_group_size=size)} for size in (1000, 2000)
    ),
}


@cache
def _plan(options: str) -> Plan:
    return tiny_plan(**json.loads(options))


def _plans(pair: Pair) -> list[Plan]:
    return [_plan(json.dumps(options)) for options in pair]


@pytest.mark.parametrize("key", TOLD)
def test_what_takes_effect_is_named(key: str, tmp_path: Path) -> None:
    then, now = _plans(TOLD[key])
    assert layout_problems(now, then, tmp_path) == []
    told = describe_changes(now, then)
    assert told is not None
    assert f"{key.removesuffix('.keep')} " in told.removeprefix("resume changes ")
    assert told.count(" → ") == 1
    assert describe_changes(now, now) is None


@pytest.mark.parametrize("key", REFUSED)
def test_what_cannot_change_is_one_error_with_both_values(key: str, tmp_path: Path) -> None:
    then, now = _plans(REFUSED[key])
    problems = [problem for problem in layout_problems(now, then, tmp_path) if str(problem.key).startswith(key)]
    (change,) = [change for change in changes(now, then) if change.key == key]
    (problem,) = problems
    later, before = (list(value) if isinstance(value, tuple) else value for value in (change.now, change.then))
    for shown in (f"={later}", f"saved with {before}", change.rule.why, f"{change.name} to {before}"):
        assert shown in str(problem)
    assert layout_problems(now, now, tmp_path) == []


@pytest.mark.parametrize("key", CONVERTED)
def test_what_changes_the_layout_is_named_and_refused_only_if_none_may_be_read(key: str, tmp_path: Path) -> None:
    then, now = _plans(CONVERTED[key])
    assert layout_problems(now, then, tmp_path) == []
    (change,) = [change for change in changes(now, then) if change.key == key]
    (problem,) = layout_problems(now, then, tmp_path, convert=False)
    for shown in (str(change), f"{change.name} to {change.then}"):
        assert shown in str(problem)
    assert str(change) in str(describe_layout(now, then))
    assert str(change) not in str(describe_changes(now, then))


def test_states_in_8_bit_of_a_ranks_own_rows_go_over_to_no_other_sharding(tmp_path: Path) -> None:
    pair: Pair = tuple(
        {"train": {"optimizer": "adamw_8bit"}, **_torch("fsdp2", fsdp2={"dp_replicate_size": size})} for size in (1, 2)
    )
    then, now = _plans(pair)
    (problem,) = layout_problems(now, then, tmp_path)
    assert "dp_replicate_size 1 → 2" in str(problem)
    assert "have a scale for each 256 numbers" in str(problem)
