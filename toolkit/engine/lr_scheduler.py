"""Learning-rate schedules by transformers' names, whose length may be unknown until the data is read."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from toolkit.planning.plan import Plan


class LazyLRScheduler:
    """A schedule that DeepSpeed steps once per optimizer step.

    Args:
        plan: Resolved plan, with the schedule, its warm-up and its minimum rate.

    Source:
        transformers optimization.py get_scheduler: the multipliers are taken from its scheduler over a
        throw-away optimizer.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._multiplier: Callable[[int], float] | None = None
        self._scheduler: LambdaLR | None = None
        if plan.settings.max_steps is not None:
            self.set_num_steps(plan.settings.max_steps)

    def set_num_steps(self, num_steps: int) -> None:
        """Set the length of the run, in optimizer steps, and with it the rate of the next step."""
        train, settings = self._plan.job.train, self._plan.settings
        arguments = {}
        if settings.min_learning_rate_ratio is not None:
            arguments["min_lr_rate"] = settings.min_learning_rate_ratio
        warmup = self._plan.warmup_steps(num_steps)
        scheduler = get_scheduler(
            train.lr_scheduler_type,
            # The polynomial schedule ends at an absolute rate, 1e-7, so its multipliers depend on the peak.
            torch.optim.SGD([torch.zeros(1)], lr=settings.learning_rate),
            num_warmup_steps=warmup,
            # The polynomial schedule divides by the steps after the warm-up, which are zero in a run of one step.
            num_training_steps=max(num_steps, warmup + 1),
            scheduler_specific_kwargs=arguments,
        )
        self._multiplier = scheduler.lr_lambdas[0]
        self.set_rates()

    def multiplier(self, step: int) -> float:
        """Return the multiplier of the peak rate at an optimizer step; 1 until the length is known."""
        return 1.0 if self._multiplier is None else float(self._multiplier(step))

    @property
    def is_set(self) -> bool:
        """True if the length of the run is known."""
        return self._multiplier is not None

    def build(self, optimizer: torch.optim.Optimizer) -> LambdaLR:
        """Create the scheduler of an optimizer, for `deepspeed.initialize(lr_scheduler=...)`."""
        # A lambda is not part of LambdaLR.state_dict(), so a checkpoint has the step alone.
        self._scheduler = LambdaLR(optimizer, lambda step: self.multiplier(step))
        return self._scheduler

    def set_rates(self) -> None:
        """Set the rate of the next step again: the scheduler computed it for another length or peak."""
        scheduler = self._scheduler
        if scheduler is None:
            return
        rates = [rate * self.multiplier(scheduler.last_epoch) for rate in scheduler.base_lrs]
        for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        scheduler._last_lr = rates
