"""A plan's optimizer hyperparameters, preserved when a checkpoint with those of an earlier plan is loaded."""

from __future__ import annotations

import copy
from typing import Any

from toolkit.distributed.deepspeed_private import clipping_norm, inner_optimizer, set_clipping_norm

# What schedulefree's optimizers count in their groups (schedulefree adamw_schedulefree.py).
COUNTED = ("k", "weight_sum", "lr_max", "scheduled_lr", "train_mode")


class Hyperparameters:
    """Learning rates, betas, epsilon, momentum, weight decay and the clipping norm of an engine at construction.

    A checkpoint contains its own: torch's optimizers and schedulers save them with their state, and DeepSpeed's wrappers
    the clipping norm.

    Args:
        engine: DeepSpeed engine that has not loaded a checkpoint: its values are the plan's.

    Source:
        torch optim/optimizer.py load_state_dict.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._groups = [
            {name: copy.copy(group[name]) for name in _names(engine, group)}
            for group in inner_optimizer(engine).param_groups
        ]
        self._base_rates = list(engine.lr_scheduler.base_lrs)
        self._clip = clipping_norm(engine)

    def put_back(self) -> None:
        """Restore them in the engine, and in its scheduler the base rate of each step's rate."""
        groups = inner_optimizer(self._engine).param_groups
        for group, values in zip(groups, self._groups, strict=True):
            group.update(values)
        self._engine.lr_scheduler.base_lrs = list(self._base_rates)
        if self._clip is not None:
            set_clipping_norm(self._engine, self._clip)


def _names(engine: Any, group: dict[str, Any]) -> list[str]:
    """Return the keys of a group that the plan sets: not its parameters, nor what DeepSpeed's FusedAdam and schedulefree's count."""
    defaults = inner_optimizer(engine).defaults
    return [name for name in group if (name in defaults and name not in COUNTED) or name == "initial_lr"]
