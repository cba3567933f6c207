"""Optimizers that DeepSpeed does not make: torch's under DDP and FSDP2, and bitsandbytes'."""

from __future__ import annotations

from typing import Any

import torch

from toolkit.errors import PlanError, first_line
from toolkit.launch.packages import package_of_optimizer
from toolkit.planning.plan import Plan

# What bitsandbytes' 8-bit states mean: one table of 256 numbers for each moment, the same for all weights.
TABLES = {"qmap1": "dynamic", "qmap2": "udynamic"}


def made_here(plan: Plan, groups: list[Any]) -> torch.optim.Optimizer:
    """Return the optimizer of a plan over parameter groups.

    Raises:
        PlanError: OPTIMIZER_PACKAGE if bitsandbytes cannot be imported.
    Source:
        bitsandbytes optim/adamw.py AdamW8bit, optim/lion.py Lion; arXiv 2110.02861 (blocks of 8-bit states), 2302.06675 (Lion).
    """
    train, rate = plan.job.train, plan.settings.learning_rate
    if train.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=train.momentum or 0.0, weight_decay=train.weight_decay)
    betas = (train.adam_beta1, train.adam_beta2)
    if train.optimizer == "lion":
        return _bitsandbytes(plan).Lion(groups, lr=rate, betas=betas, weight_decay=train.weight_decay)  # type: ignore[no-any-return]
    kind = _bitsandbytes(plan).AdamW8bit if train.optimizer == "adamw_8bit" else torch.optim.AdamW
    return kind(groups, lr=rate, betas=betas, eps=train.adam_epsilon, weight_decay=train.weight_decay)


def complete_state(optimizer: torch.optim.Optimizer, weight: torch.Tensor, state: dict[str, Any]) -> None:
    """Add to the saved state of a weight what is not saved, in place: bitsandbytes' tables, and its step as a number.

    Source:
        bitsandbytes optim/optimizer.py Optimizer2State.init_state.
    """
    tables = getattr(optimizer, "name2qmap", None)
    if tables is None:  # torch's
        return
    state["step"] = int(state["step"])
    if "absmax1" in state:
        state |= {key: tables[name].to(weight.device) for key, name in TABLES.items()}


def _bitsandbytes(plan: Plan) -> Any:
    try:
        from bitsandbytes import optim
    except ImportError as error:
        raise PlanError(package_of_optimizer(plan.job.train.optimizer).problem(first_line(error))) from None
    return optim
