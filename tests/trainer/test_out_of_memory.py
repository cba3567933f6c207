"""Which exceptions mean that memory ran out, and what is said where nothing was measured."""

from __future__ import annotations

import pytest
import torch
from tiny_plans import tiny_plan

from toolkit.trainer.out_of_memory import out_of_memory, ran_out


@pytest.mark.parametrize(
    ("error", "out"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes"), True),
        (RuntimeError("shapes differ"), False),
        (ValueError("can't allocate memory"), False),
    ],
)
def test_what_means_that_memory_ran_out(error: Exception, out: bool) -> None:
    assert ran_out(error) is out


def test_before_the_model_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def untraceable(plan: object) -> None:
        raise ValueError("a custom layer")

    monkeypatch.setattr("toolkit.memory.estimate.estimate", untraceable)
    (problem,) = out_of_memory(tiny_plan(), None, torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB")).problems
    assert "while the model was built: CUDA out of memory" in problem.message
    assert "no estimate of this model: a custom layer" in problem.message
    assert problem.fix.startswith("Try train.")
