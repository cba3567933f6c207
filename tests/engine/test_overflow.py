"""A gradient in fp16 that is not finite on one rank alone skips the step on all, and the scale of the loss falls on all alike."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from ranks import leave_group, run_distributed
from tiny_plans import step_batches, tiny_plan

import toolkit as tk

# Axes, of two ranks each; the type of the gradients' sums; and whose gradient is infinite. A norm's weight is whole on each tensor rank,
# of which the norm of all gradients counts one.
LAYOUTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "data": ({}, "fp16", "input_layernorm"),
    "data, fp32 sums": ({}, "fp32", "input_layernorm"),
    "pipeline": ({"pipeline": 2}, "fp16", "input_layernorm"),
    "tensor, a shard": ({"tensor": 2}, "fp16", "q_proj"),
    "tensor, whole": ({"tensor": 2}, "fp16", "input_layernorm"),
}
CASES = [(layout, stage) for layout in LAYOUTS for stage in (1, 2, 3)]
# Those by default; ZeRO-3 looks for an overflow by DeepSpeed's own method.
DEFAULT = [
    (layout, stage) for layout, stage in CASES if stage == 1 or (layout, stage) in (("tensor, whole", 2), ("data", 3))
]
MASTERS = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")  # of stages 1 and 2, and of 3
# Overflows until DeepSpeed halves the scale (runtime/precision_config.py hysteresis).
OVERFLOWS = 2


def overflow_everywhere(rank: int, cases: list[tuple[str, int]]) -> dict[tuple[str, int], Any]:
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    leave_group()
    found: dict[tuple[str, int], Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CPU_Accelerator, "is_fp16_supported", lambda self: True)  # torch computes it there
        for name, stage in cases:
            axes, *others = LAYOUTS[name]
            found[name, stage] = overflow(rank, axes | {"zero_stage": stage}, *others)
    return found


def overflow(rank: int, parallel: dict[str, Any], sums: Any, weight: str) -> dict[str, Any]:
    """Train a step, then some whose gradient is infinite on the second rank, then one more."""
    plan = tiny_plan(train={"optimizer": "sgd", "learning_rate": 0.1}, parallel=parallel)
    half = dataclasses.replace(plan.settings, precision="fp16", gradient_accumulation_dtype=sums)
    with tk.initialize(dataclasses.replace(plan, settings=half)) as run:
        optimizer = run.engine.optimizer

        def step(number: int) -> float:
            return float(run.step(step_batches(number, ranks=plan.grid.dp)[run.world.coordinate.dp]))

        def weights() -> list[torch.Tensor]:
            return [value.detach().clone() for value in getattr(optimizer, MASTERS[parallel["zero_stage"] == 3])]

        step(0)
        before, scale = weights(), optimizer.loss_scale
        hooks = [
            parameter.register_hook(lambda gradient: gradient * float("inf"))
            for name, parameter in run.model.named_parameters()
            if rank == 1 and weight in name
        ]
        for number in range(OVERFLOWS):
            step(1 + number)
        skipped = run.engine.skipped_steps
        unchanged = all(map(torch.equal, before, weights()))
        lowered = optimizer.loss_scale / scale
        for hook in hooks:
            hook.remove()
        loss = step(1 + OVERFLOWS)
        return {
            "hooks": len(hooks),
            "skipped": skipped,
            "unchanged": unchanged,
            "lowered": lowered,
            "skipped later": run.engine.skipped_steps - skipped,
            "changed": not all(map(torch.equal, before, weights())),
            "loss": loss,
            "norm": run.gradient_norm,
        }


@pytest.fixture(scope="module")
def ranks() -> list[dict[tuple[str, int], Any]]:
    return run_distributed(overflow_everywhere, 2, DEFAULT, timeout_seconds=240)


@pytest.fixture(scope="module")
def rest() -> list[dict[tuple[str, int], Any]]:
    return run_distributed(overflow_everywhere, 2, [case for case in CASES if case not in DEFAULT], timeout_seconds=240)


@pytest.mark.gloo
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("layout", "stage"), [pytest.param(*case, marks=() if case in DEFAULT else pytest.mark.full) for case in CASES]
)
def test_an_overflow_on_one_rank_skips_the_step_on_all(request: pytest.FixtureRequest, layout: str, stage: int) -> None:
    found_by = request.getfixturevalue("ranks" if (layout, stage) in DEFAULT else "rest")
    first, second = (found[layout, stage] for found in found_by)
    assert (first.pop("hooks"), second.pop("hooks") > 0) == (0, True)
    wanted = {"skipped": OVERFLOWS, "unchanged": True, "lowered": 0.5, "skipped later": 0, "changed": True}
    for found in (first, second):
        assert {key: found[key] for key in wanted} == wanted
    assert first["loss"] == second["loss"]
    assert first["norm"] == second["norm"] < float("inf")
