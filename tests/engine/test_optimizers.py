"""Optimizers of bitsandbytes as the toolkit makes them."""

from __future__ import annotations

import bitsandbytes
import pytest
import torch

import toolkit as tk
from toolkit.config.loader import parse_job
from toolkit.engine import optimizers


def test_a_weight_too_long_for_bitsandbytes_is_stepped_in_parts_as_if_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "LONGEST", 2 * optimizers.BLOCK)
    start = torch.randn(20, 256 + 3, generator=torch.Generator().manual_seed(0))
    options = {"betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "lr": 1e-2}
    whole, parts = (torch.nn.Parameter(start.clone()) for _ in range(2))
    job = {
        "model": {"name": "llama-3.2-1b"},
        "cluster": {"gpu": "cpu"},
        "train": {
            "optimizer": "adamw_8bit", "learning_rate": 1e-2, "adam_beta2": 0.99, "weight_decay": 0.1,
            "sequence_length": 8, "per_device_train_batch_size": 1,
        },
    }  # fmt: skip
    expected = bitsandbytes.optim.AdamW8bit([whole], **options)
    found = optimizers.made_here(tk.resolve(parse_job(job)), [parts], torch.nn.Module())
    for step in range(3):
        gradient = torch.randn(start.shape, generator=torch.Generator().manual_seed(step + 1))
        for weight, optimizer in ((whole, expected), (parts, found)):
            weight.grad = gradient.clone()
            optimizer.step()
    assert torch.equal(whole, parts)
    state, parted = expected.state[whole], found.state[parts]
    assert list(found.state) == [parts]
    assert parted["step"] == 3
    assert state["step"] == 3
    assert all(torch.equal(state[key], parted[key]) for key in ("state1", "state2", "absmax1", "absmax2"))
