"""What a plan sets of an optimizer, kept over the loading of a checkpoint, which holds what an earlier plan set."""

from __future__ import annotations

import copy
from typing import Any


class Hyperparameters:
    """Learning rates, betas, epsilon, momentum, weight decay and the clipping norm of an engine, as they are now.

    A checkpoint brings its own along: torch's optimizers and schedulers save them with their state, and DeepSpeed's wrappers
    the clipping norm.

    Args:
        engine: A DeepSpeed engine that has loaded nothing yet: its numbers are the plan's.

    Source:
        torch optim/optimizer.py load_state_dict; deepspeed runtime/zero/stage_1_and_2.py _load_global_state,
        runtime/bf16_optimizer.py and runtime/fp16/fused_optimizer.py load_state_dict.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._groups = [
            {name: copy.copy(group[name]) for name in _names(engine, group)}
            for group in engine.basic_optimizer.param_groups
        ]
        self._base_rates = list(engine.lr_scheduler.base_lrs)
        self._clip = getattr(engine.optimizer, "clip_grad", None)

    def put_back(self) -> None:
        """Sets them again in the engine, and in its scheduler the rate from which each step's is computed."""
        groups = self._engine.basic_optimizer.param_groups
        for group, values in zip(groups, self._groups, strict=True):
            group.update(values)
        self._engine.lr_scheduler.base_lrs = list(self._base_rates)
        if self._clip is not None:
            self._engine.optimizer.clip_grad = self._clip


def _names(engine: Any, group: dict[str, Any]) -> list[str]:
    """Names what the plan sets of a group: not its parameters, nor the count of steps that DeepSpeed's FusedAdam keeps there."""
    return [name for name in group if name in engine.basic_optimizer.defaults or name == "initial_lr"]
