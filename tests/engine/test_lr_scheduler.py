"""Learning rates are those of transformers, also when the length of the run is known late."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from tiny_plans import tiny_plan
from transformers import TrainingArguments, get_scheduler

from toolkit.config.job import Schedule
from toolkit.engine.lr_scheduler import LazyLRScheduler
from toolkit.errors import PlanError
from toolkit.planning.plan import Plan

PEAK, STEPS = 3e-4, 23
CASES: dict[str, dict[str, Any]] = {
    name: {"lr_scheduler_type": name, "warmup_ratio": None if name == "constant" else 0.13}
    for name in get_args(Schedule)
}
CASES["cosine_with_min_lr"]["min_learning_rate_ratio"] = 0.1
CASES["linear, warm-up in steps"] = {"lr_scheduler_type": "linear", "warmup_steps": 4}
CASES["cosine, no warm-up"] = {"lr_scheduler_type": "cosine", "warmup_steps": 0}
CASES["cosine, floor of 0"] = {"lr_scheduler_type": "cosine_with_min_lr", "min_learning_rate_ratio": 0.0}


def plan_of(train: dict[str, Any], *, max_steps: int | None = STEPS) -> Plan:
    length: dict[str, Any] = {"max_steps": max_steps, "num_train_epochs": None if max_steps else 1.0}
    return tiny_plan(ranks=1, train={"learning_rate": PEAK, **length, **train})


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": [torch.zeros(1)]}, {"params": [torch.zeros(1)]}], lr=PEAK)


def rates(scheduler: Any, count: int) -> list[float]:
    found = []
    for _ in range(count):
        first, second = (group["lr"] for group in scheduler.optimizer.param_groups)
        assert first == second == scheduler.get_last_lr()[0]
        found.append(first)
        scheduler.optimizer.step()
        scheduler.step()
    return found


def rates_of_transformers(plan: Plan, *, steps: int = STEPS) -> list[float]:
    """What `Trainer` does: trainer.py create_scheduler and training_args.py get_warmup_steps."""
    train, settings = plan.job.train, plan.settings
    floor = {} if train.min_learning_rate_ratio is None else {"min_lr_rate": train.min_learning_rate_ratio}
    warmup = settings.warmup_steps if settings.warmup_steps is not None else (settings.warmup_ratio or 0.0)
    arguments = TrainingArguments(output_dir="unused", warmup_steps=warmup, use_cpu=True, report_to="none")
    scheduler = get_scheduler(
        train.lr_scheduler_type,
        optimizer(),
        num_warmup_steps=arguments.get_warmup_steps(steps),
        num_training_steps=steps,
        scheduler_specific_kwargs=floor,
    )
    return rates(scheduler, steps)


@pytest.mark.parametrize("name", CASES)
def test_each_step_has_the_rate_that_transformers_gives(name: str) -> None:
    plan = plan_of(CASES[name])
    expected = rates_of_transformers(plan)
    assert rates(LazyLRScheduler(plan).build(optimizer()), STEPS) == pytest.approx(expected, rel=1e-9)
    assert expected[-1] < PEAK or "constant" in name


@pytest.mark.parametrize("name", ["linear", "cosine", "polynomial", "inverse_sqrt"])
def test_a_length_that_comes_late_gives_the_same_rates(name: str) -> None:
    plan = plan_of(CASES[name], max_steps=None)
    schedule = LazyLRScheduler(plan)
    scheduler = schedule.build(optimizer())
    assert not schedule.is_set
    schedule.set_num_steps(STEPS)
    assert schedule.is_set
    found = rates(scheduler, STEPS)
    assert found[0] == 0, "the warm-up starts with the first step"
    assert found == pytest.approx(rates_of_transformers(plan), rel=1e-9)


def test_a_longer_run_changes_the_rate_of_the_next_step() -> None:
    plan = plan_of(CASES["cosine"])
    schedule = LazyLRScheduler(plan)
    scheduler = schedule.build(optimizer())
    rates(scheduler, 11)
    schedule.set_num_steps(2 * STEPS)
    assert rates(scheduler, 5) == pytest.approx(rates_of_transformers(plan, steps=2 * STEPS)[11:16], rel=1e-9)


@pytest.mark.parametrize("late", [False, True])
def test_a_restored_state_goes_on_where_it_stopped(late: bool) -> None:
    plan = plan_of(CASES["cosine"], max_steps=None if late else STEPS)
    whole, first = LazyLRScheduler(plan), LazyLRScheduler(plan)
    whole.set_num_steps(STEPS)
    first.set_num_steps(STEPS)
    stopped = first.build(optimizer())
    rates(stopped, 9)
    resumed = LazyLRScheduler(plan)
    scheduler = resumed.build(optimizer())
    scheduler.optimizer.load_state_dict(stopped.optimizer.state_dict())
    scheduler.load_state_dict(stopped.state_dict())
    resumed.set_num_steps(STEPS)
    expected = rates(whole.build(optimizer()), STEPS)[9:]
    assert rates(scheduler, STEPS - 9) == pytest.approx(expected, rel=1e-9)


def test_warm_up_in_steps_wins_over_a_ratio() -> None:
    assert plan_of({"lr_scheduler_type": "linear", "warmup_steps": 3}).warmup_steps(100) == 3
    assert plan_of({"lr_scheduler_type": "linear", "warmup_ratio": 0.031}).warmup_steps(100) == 4
    assert plan_of({"lr_scheduler_type": "constant"}).warmup_steps(100) == 0


@pytest.mark.parametrize("name", [name for name in get_args(Schedule) if name != "constant"])
def test_a_run_of_one_step_is_all_warm_up(name: str) -> None:
    floor = {"min_learning_rate_ratio": 0.1} if name == "cosine_with_min_lr" else {}
    plan = plan_of({"lr_scheduler_type": name, "warmup_ratio": 0.03, **floor}, max_steps=1)
    assert rates(LazyLRScheduler(plan).build(optimizer()), 1) == [0.0]


def test_the_lowest_polynomial_rate_that_is_planned_can_be_scheduled() -> None:
    polynomial = {"lr_scheduler_type": "polynomial", "warmup_steps": 0}
    least = 1.01e-7
    found = rates(LazyLRScheduler(plan_of({**polynomial, "learning_rate": least})).build(optimizer()), STEPS)
    assert found == sorted(found, reverse=True)
    with pytest.raises(PlanError) as caught:
        plan_of({**polynomial, "learning_rate": 1e-7})
    assert caught.value.codes == ("POLYNOMIAL_RATE",)
