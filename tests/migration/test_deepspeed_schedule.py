"""DeepSpeed's schedules have the rates that transformers' have in the migrated job."""

from __future__ import annotations

import pytest
from readings import read, values

from toolkit.migration.deepspeed import DEEPSPEED


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("WarmupLR", {"warmup_num_steps": 10, "warmup_max_lr": 2e-4}),
        ("WarmupDecayLR", {"warmup_num_steps": 10, "warmup_max_lr": 2e-4, "total_num_steps": 100}),
        ("WarmupDecayLR", {"warmup_num_steps": 10, "total_num_steps": 100}),
        ("WarmupCosineLR", {"warmup_num_steps": 10, "total_num_steps": 100, "cos_min_ratio": 0.1}),
        ("WarmupCosineLR", {"warmup_num_steps": 10, "total_num_steps": 100}),
        ("WarmupCosineLR", {"warmup_num_steps": 10, "total_num_steps": 100, "cos_min_ratio": 0}),
    ],
)
def test_the_rates_of_a_run(kind, params):
    import torch
    from deepspeed.runtime import lr_schedules
    from transformers import get_scheduler

    params = {**params, "warmup_type": "linear"}
    keys = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "scheduler": {"type": kind, "params": params}}
    draft, _ = read(DEEPSPEED, keys, deepspeed=keys)
    assert draft.problems == []

    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1e-4)
    theirs = getattr(lr_schedules, kind)(optimizer, **params)
    ratio = draft.get("train.min_learning_rate_ratio")
    ours = get_scheduler(
        draft.get("train.lr_scheduler_type"),
        torch.optim.SGD([torch.zeros(1)], lr=1.0),
        num_warmup_steps=draft.get("train.warmup_steps"),
        num_training_steps=100,
        scheduler_specific_kwargs={} if ratio is None else {"min_lr_rate": ratio},
    ).lr_lambdas[0]
    for step in range(0, 100, 7):
        theirs.step(step)
        # DeepSpeed's cosine is a step ahead.
        ahead = int(kind == "WarmupCosineLR" and step >= 10)
        assert draft.get("train.learning_rate") * ours(step + ahead) == pytest.approx(
            optimizer.param_groups[0]["lr"], rel=1e-6, abs=1e-12
        )


def test_a_logarithmic_warm_up_is_told():
    _, entries = read(DEEPSPEED, {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}})
    assert "logarithm" in entries["scheduler.type"].reason


def test_what_the_trainer_decides():
    keys = {
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": dict.fromkeys(("warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
        }
    }
    assert values(DEEPSPEED, keys, "train.learning_rate", "train.warmup_steps", trainer=True, deepspeed=keys) == [
        None,
        None,
    ]
