"""Optimizers of bitsandbytes as the toolkit makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from tiny_plans import step_batches, tiny_plan

import toolkit as tk
from toolkit.checkpoint.pickles import read_pickle
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


@pytest.fixture
def managed(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Managed memory that is none: tensors of 1,000 numbers and more that say that they are paged."""
    made: list[torch.Tensor] = []

    def buffer(_: Any, weight: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        room: Any = torch.zeros(weight.shape, dtype=dtype)
        if weight.numel() >= 1000:
            room.is_paged, room.page_deviceid = True, 0
            made.append(room)
        return room  # type: ignore[no-any-return]

    def update(name: str, grad: Any, weight: Any, *rest: Any, **others: Any) -> None:
        assert all(map(optimizers.is_paged, rest[:2])) == (weight.numel() >= 512), "each piece says so, too"
        inside(name, grad, weight, *rest, **others)

    inside = bitsandbytes.functional.optimizer_update_8bit_blockwise
    monkeypatch.setattr(bitsandbytes.optim.optimizer.Optimizer8bit, "get_state_buffer", buffer)
    monkeypatch.setattr(bitsandbytes.functional, "prefetch_tensor", lambda tensor: None)
    monkeypatch.setattr(bitsandbytes.functional, "optimizer_update_8bit_blockwise", update)
    return made


def test_paged_states_are_paged_in_parts_and_after_they_are_loaded(
    monkeypatch: pytest.MonkeyPatch, managed: list[torch.Tensor], tmp_path: Path
) -> None:
    monkeypatch.setattr(optimizers, "LONGEST", 4 * optimizers.BLOCK)
    start = torch.randn(20, 256, generator=torch.Generator().manual_seed(0))
    train = {"optimizer": "paged_adamw_8bit", "learning_rate": 1e-2, "sequence_length": 8, "train_batch_size": 1}
    job = {"model": {"name": "llama-3.2-1b"}, "cluster": {"gpu": "h100-sxm-80gb"}, "train": train}
    plan = tk.resolve(parse_job(job))
    weights = [torch.nn.Parameter(start.clone()) for _ in range(3)]
    plain = bitsandbytes.optim.AdamW8bit(weights[:1], lr=1e-2, weight_decay=0.0)
    paged, loaded = (optimizers.made_here(plan, [weight], torch.nn.Module()) for weight in weights[1:])

    def step(seed: int, *optimizers_: Any) -> None:
        for optimizer in optimizers_:
            weight = optimizer.param_groups[0]["params"][0]
            weight.grad = torch.randn(start.shape, generator=torch.Generator().manual_seed(seed))
            optimizer.step()

    step(1, paged, loaded)
    rooms = list(managed)
    assert len(rooms) == 4
    step(2, paged)
    torch.save(paged.state_dict(), tmp_path / "state.pt")
    saved = read_pickle(tmp_path, "state.pt")
    assert "is_paged" not in (tmp_path / "state.pt").read_bytes().decode("latin-1")
    loaded.load_state_dict(saved)
    weights[2].data.copy_(weights[1].data)
    assert len(managed) == 4, "what was there is used again"
    assert [loaded.state[weights[2]][key] is room for key, room in zip(optimizers.MOMENTS, rooms[2:], strict=True)]
    fresh = optimizers.made_here(plan, [torch.nn.Parameter(start)], torch.nn.Module())
    state = {key: value.clone() for key, value in paged.state[weights[1]].items() if torch.is_tensor(value)} | {
        "step": 2.0
    }
    optimizers.complete_state(fresh, start, state)
    assert [state[key] is room for key, room in zip(optimizers.MOMENTS, managed[4:], strict=True)]
    assert torch.equal(state["state1"], paged.state[weights[1]]["state1"])
    step(3, paged, loaded)
    monkeypatch.undo()
    for seed in (1, 2, 3):
        step(seed, plain)
    for weight in weights[1:]:
        assert torch.equal(weight, weights[0])


@pytest.mark.gloo
def test_one_rank_of_fsdp2_resumes_its_states_of_8_bits(tmp_path: Path) -> None:
    train = {"optimizer": "adamw_8bit", "learning_rate": 1e-2}
    plan = tiny_plan(ranks=1, train=train, parallel={"zero_stage": None, "strategy": "fsdp2"})
    with tk.initialize(plan) as run:
        run.step(step_batches(0, ranks=1)[0])
        tk.save(run, tmp_path / "saved")
        straight = [float(run.step(step_batches(step, ranks=1)[0])) for step in (1, 2)]
    with tk.initialize(plan) as run:
        tk.load(run, tmp_path / "saved")
        assert [float(run.step(step_batches(step, ranks=1)[0])) for step in (1, 2)] == straight
