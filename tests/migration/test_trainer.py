"""Trainer's arguments mean in a job what they mean in transformers."""

from __future__ import annotations

import pytest
from readings import outcome, read, values

from toolkit.migration.draft import Draft
from toolkit.migration.trainer import TRAINER

SAME = [
    ({"max_steps": 10, "num_train_epochs": 3}, "train.max_steps", 10),
    ({"max_steps": -1, "num_train_epochs": 3}, "train.num_train_epochs", 3),
    ({}, "train.num_train_epochs", 3),
    ({"warmup_steps": 5, "warmup_ratio": 0.1}, "train.warmup_steps", 5),
    ({"warmup_steps": 0, "warmup_ratio": 0.1}, "train.warmup_ratio", 0.1),
    ({"warmup_steps": 0.2}, "train.warmup_ratio", 0.2),
    ({}, "train.warmup_steps", 0),
    ({"lr_scheduler_type": "constant", "warmup_steps": 9}, "train.warmup_steps", None),
    ({"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-6}, "learning_rate": 1e-5}, "train.min_learning_rate_ratio", 0.1),
    ({"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": '{"min_lr_rate": 0.2}'}, "train.min_learning_rate_ratio", 0.2),
    ({"lr_scheduler_type": "cosine_with_restarts"}, "train.lr_scheduler_type", "cosine"),
    ({"bf16": True}, "train.precision", "bf16"),
    ({"fp16": True, "bf16": False}, "train.precision", "fp16"),
    ({}, "train.precision", "fp32"),
    ({"optim": "adamw_torch_fused"}, "train.optimizer", "adamw_torch_fused"),
    ({"optim": "paged_adamw_32bit"}, "train.optimizer", "adamw_torch"),
    ({"optim": "adamw_torch", "adafactor": True}, "train.optimizer", "adafactor"),
    ({"save_strategy": "epoch"}, "train.saves_per_epoch", 1),
    ({"save_steps": 0.1}, "train.save_steps", 0.1),
    ({}, "train.save_steps", 500),
    ({"gradient_checkpointing": True}, "train.gradient_checkpointing", True),
    ({}, "train.gradient_checkpointing", False),
    ({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"every_n_layers": 2}}, "train.gradient_checkpointing", True),
    ({"use_liger_kernel": True}, "train.loss", "liger"),
    ({"use_liger_kernel": True, "liger_kernel_config": {"fused_linear_cross_entropy": False}}, "train.loss", None),
    ({}, "parallel.strategy", "ddp"),
    ({"fsdp": "full_shard auto_wrap offload"}, "parallel.fsdp2.cpu_offload", True),
    ({"fsdp": ["shard_grad_op"]}, "parallel.fsdp2.reshard_after_forward", False),
    ({"fsdp": "no_shard"}, "parallel.strategy", "ddp"),
    ({"fsdp": True, "fsdp_config": {"version": 2, "reshard_after_forward": False}}, "parallel.fsdp2.reshard_after_forward", False),
    ({"ddp_bucket_cap_mb": 50}, "parallel.ddp.bucket_cap_mb", 50),
    ({"push_to_hub": True, "hub_model_id": "a/b", "hub_private_repo": True}, "train.hub_private_repo", True),
    ({"report_to": "wandb,swanlab"}, "train.report_to", ["wandb"]),
    ({"report_to": []}, "train.report_to", []),
    ({"learning_rate": "2e-5"}, "train.learning_rate", 2e-5),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "target", "value"), SAME)
def test_a_value(keys, target, value):
    assert values(TRAINER, keys, target) == [value]


@pytest.mark.parametrize(
    ("key", "keys"),
    [
        ("lr_scheduler_type", {"lr_scheduler_type": "reduce_lr_on_plateau"}),
        ("lr_scheduler_type", {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 3}}),
        ("lr_scheduler_kwargs", {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2}}),
        ("optim", {"optim": "galore_adamw"}),
        ("bf16", {"bf16": True, "fp16": True}),
        ("save_strategy", {"save_strategy": "best"}),
        ("logging_steps", {"logging_steps": 0.1}),
        ("report_to", {"report_to": "all"}),
        ("push_to_hub", {"push_to_hub": True}),
        ("torch_compile_mode", {"torch_compile_mode": "max-autotune"}),
        ("resume_from_checkpoint", {"resume_from_checkpoint": "out/checkpoint-5"}),
        ("eval_steps", {"eval_strategy": "steps", "eval_steps": 5}),
        ("weight_decay", {"weight_decay": "much"}),
    ],
)
def test_what_no_job_says(key, keys):
    entry = read(TRAINER, keys)[1][key]
    assert (entry.outcome, bool(entry.reason)) == ("not carried", True)


@pytest.mark.parametrize(
    ("key", "keys"),
    [
        ("num_train_epochs", {"max_steps": 5, "num_train_epochs": 1}),
        ("eval_steps", {"eval_strategy": "no", "eval_steps": 5}),
        ("hub_model_id", {"hub_model_id": "a/b"}),
        ("torch_compile_backend", {"torch_compile_backend": "inductor"}),
        ("resume_from_checkpoint", {"resume_from_checkpoint": None}),
        ("full_determinism", {"full_determinism": False}),
        ("ddp_bucket_cap_mb", {"ddp_bucket_cap_mb": 50, "fsdp": "full_shard"}),
        ("metric_for_best_model", {"metric_for_best_model": "loss"}),
    ],
)
def test_what_a_job_does_without(key, keys):
    assert outcome(TRAINER, key, keys) == "not needed"


def test_evaluations_need_validation_data():
    keys = {
        "eval_strategy": "steps",
        "eval_steps": 20,
        "eval_on_start": True,
        "per_device_eval_batch_size": 2,
        "load_best_model_at_end": True,
    }
    draft = Draft()
    draft.put("data.validation_fraction", 0.1)
    _, entries = read(TRAINER, keys, draft=draft)
    expected = {
        "eval_steps": 20,
        "eval_on_start": True,
        "per_device_eval_batch_size": 2,
        "load_best_model_at_end": True,
    }
    assert expected.items() <= draft.document()["train"].items()
    _, without = read(TRAINER, keys)
    assert {
        without[key].outcome for key in ("eval_strategy", "eval_steps", "eval_on_start", "load_best_model_at_end")
    } == {"not carried"}
    assert entries["eval_strategy"].outcome == "not needed"


def test_a_deepspeed_file_names_optimizer_and_schedule():
    config = {"optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupLR"}}
    _, entries = read(TRAINER, {"optim": "adafactor", "lr_scheduler_type": "cosine"}, deepspeed=config)
    assert {key: entry.outcome for key, entry in entries.items()} == {
        "optim": "not needed",
        "lr_scheduler_type": "not needed",
    }


def test_deepspeed_without_clipping_is_told():
    draft, _ = read(TRAINER, {"max_grad_norm": 1.0}, deepspeed={"zero_optimization": {"stage": 1}})
    assert any("clips no gradients" in note for note in draft.notes)
    draft, _ = read(TRAINER, {"max_grad_norm": 1.0}, deepspeed={"gradient_clipping": "auto"})
    assert not draft.notes
