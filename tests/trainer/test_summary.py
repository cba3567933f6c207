"""The line that says what was built."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tiny_plans import tiny_plan
from torch import nn

from toolkit.trainer.summary import describe_model
from toolkit.units import format_count


def _line(frozen: bool = False, **parallel: Any) -> str:
    plan = tiny_plan(ranks=4, parallel={"zero_stage": 1, **parallel})
    model = nn.Linear(9, 10)
    model.bias.requires_grad_(not frozen)
    run: Any = SimpleNamespace(
        plan=plan, model=model, world=SimpleNamespace(grid=plan.grid), memory=SimpleNamespace(peak_bytes=2**20)
    )
    return describe_model(run, seconds=1.5).removeprefix(f"model: {plan.model.name}, ")


def test_a_model_that_every_rank_holds() -> None:
    assert _line() == "100 parameters; ZeRO-1, fp32, 4 CPU processes; built in 1.5 s, 1.00 MiB"
    assert _line(frozen=True).startswith("100 parameters, 90 of them trained; ZeRO-1, fp32")


def test_a_model_that_ranks_share_has_its_axes_and_both_counts() -> None:
    whole = format_count(tiny_plan(ranks=4).model.num_parameters or 0)
    assert _line(pipeline=2, tensor=2).startswith(
        f"{whole} parameters, 100 on rank 0; ZeRO-1, pipeline 2 × data 1 × tensor 2, fp32, 4 CPU processes; "
    )
    assert _line(tensor=2, frozen=True).startswith(
        f"{whole} parameters, 100 on rank 0, 90 of them trained; ZeRO-1, data 2 × tensor 2, fp32"
    )
