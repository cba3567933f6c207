"""The rules of a valid plan: one function per constraint, each naming the library code that would reject or ignore it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from toolkit.errors import Problem
from toolkit.planning.rules import (
    adapters,
    context,
    data,
    deepspeed,
    fp8,
    grid,
    hardware,
    images,
    kernels,
    model,
    pipeline,
    recomputation,
    strategy,
    tasks,
    tensor,
    training,
    zero,
)
from toolkit.planning.unchecked_plan import UncheckedPlan

Rule = Callable[[UncheckedPlan], Iterable[Problem]]

RULES: tuple[Rule, ...] = (
    *tasks.RULES,
    *model.RULES,
    *hardware.RULES,
    *grid.RULES,
    *tensor.RULES,
    *pipeline.RULES,
    *context.RULES,
    *zero.RULES,
    *training.RULES,
    *adapters.RULES,
    *fp8.RULES,
    *kernels.RULES,
    *recomputation.RULES,
    *data.RULES,
    *deepspeed.RULES,
    *strategy.RULES,
    *images.RULES,
)

# Additional rules for a plan that is to run.
RUN_RULES: tuple[Rule, ...] = strategy.RUN_RULES

__all__ = ["RULES", "RUN_RULES", "Rule"]
