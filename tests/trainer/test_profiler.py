"""Where the time of steps goes adds up to the steps, and each operation is in the category of its kind."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from toolkit.config.job import Profile
from toolkit.trainer.checks import PROFILE_SUMMARY
from toolkit.trainer.profiler import CATEGORIES, Profiler, category_of


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(*[functional.gelu(self.inner(x_BSD))[:, None]] * 3).sum()


def _run(folder: Path, settings: Profile | None, *, steps: int) -> None:
    run: Any = SimpleNamespace(world=SimpleNamespace(device=torch.device("cpu"), rank=0, is_main=True))
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters())
    with Profiler(run, settings, folder) as profiler:
        for batch in profiler.fetched(torch.randn(8, 32, 32) for _ in range(steps)):
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()


def test_the_recorded_steps_and_their_categories(tmp_path: Path) -> None:
    _run(tmp_path, Profile(wait=1, warmup=1, active=2), steps=5)
    assert len(list(tmp_path.glob("rank-0.*.pt.trace.json"))) == 1
    found = json.loads((tmp_path / PROFILE_SUMMARY).read_text())
    assert (found["device"], found["steps"], found["memory_snapshot"]) == ("cpu", 2, False)
    seconds = {row["name"]: row["seconds"] for row in found["categories"]}
    assert tuple(seconds) == CATEGORIES
    assert sum(seconds.values()) == pytest.approx(found["step_seconds"], rel=0.05)
    for name in ("attention", "matrix products", "optimizer", "data", "element-wise"):
        assert seconds[name] > 0
    of = {row["name"]: row["category"] for row in found["operations"] if row["category"] != "optimizer"}
    assert {of[name] for name in of if "attention" in name.lower()} == {"attention"}
    assert sum(row["share"] for row in found["categories"]) == pytest.approx(1)


def test_a_part_of_the_steps_is_not_written(tmp_path: Path) -> None:
    _run(tmp_path, Profile(wait=1, warmup=1, active=2), steps=3)
    assert list(tmp_path.iterdir()) == []


def test_without_settings_nothing_is_recorded(tmp_path: Path) -> None:
    _run(tmp_path, None, steps=2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "above", "category"),
    [
        ("aten::addmm", None, "matrix products"),
        ("aten::mm", "Optimizer.step#Muon.step", "optimizer"),
        ("aten::bmm", "aten::_scaled_dot_product_attention_math", "attention"),
        ("ScaledDotProductFlashAttentionForCpuBackward0", None, "attention"),
        ("c10d::allreduce_", "toolkit::optimizer", "communication"),
        ("aten::mul", None, "element-wise"),
        ("toolkit::data", None, "data"),
        ("DistributedDataParallel.forward", None, "other"),
    ],
)
def test_the_category_of_an_operation(name: str, above: str | None, category: str) -> None:
    parent = None if above is None else SimpleNamespace(name=above, cpu_parent=None)
    assert category_of(SimpleNamespace(name=name, cpu_parent=parent)) == category
