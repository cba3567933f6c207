"""Optimizers that DeepSpeed does not make: torch's under DDP and FSDP2, and bitsandbytes'."""

from __future__ import annotations

import functools
from typing import Any

import torch

from toolkit.errors import PlanError, first_line
from toolkit.launch.packages import package_of_optimizer
from toolkit.planning.plan import Plan

# What bitsandbytes' 8-bit states mean: one table of 256 numbers for each moment, the same for all weights.
TABLES = {"qmap1": "dynamic", "qmap2": "udynamic"}
# Numbers of a weight that share a scale of their 8-bit states.
BLOCK = 256
# bitsandbytes counts the numbers of a weight in 32 bits. ZeRO's flat partitions have more from two billion parameters a rank on.
LONGEST = 2**30


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
    on_host = plan.job.parallel.fsdp2_options.cpu_offload
    if train.optimizer == "lion":
        return _bitsandbytes(plan).Lion(groups, lr=rate, betas=betas, weight_decay=train.weight_decay)  # type: ignore[no-any-return]
    options: dict[str, Any] = {
        "lr": rate,
        "betas": betas,
        "eps": train.adam_epsilon,
        "weight_decay": train.weight_decay,
    }
    if train.optimizer == "adamw_8bit":
        return _in_parts(_bitsandbytes(plan).AdamW8bit)(groups, **options)  # type: ignore[no-any-return]
    return torch.optim.AdamW(groups, **options, fused=True if on_host else None)  # one pass over the state in RAM


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


@functools.cache
def _in_parts(kind: Any) -> Any:
    """Return a class of bitsandbytes' optimizers that steps a weight of over `LONGEST` numbers in parts, each of whole blocks."""

    class InParts(kind):  # type: ignore[misc]
        def update_step(self, group: Any, p: torch.Tensor, gindex: int, pindex: int) -> None:
            if p.numel() <= LONGEST or p.grad is None:
                super().update_step(group, p, gindex, pindex)
                return
            state, values, gradient = self.state[p], p.data.view(-1), p.grad.reshape(-1)
            for start in range(0, p.numel(), LONGEST):
                numbers = slice(start, start + LONGEST)
                blocks = slice(start // BLOCK, (start + LONGEST) // BLOCK)
                part = torch.nn.Parameter(values[numbers])
                part.grad = gradient[numbers]
                self.state[part] = state | {
                    **{key: state[key].view(-1)[numbers] for key in ("state1", "state2")},
                    **{key: state[key][blocks] for key in ("absmax1", "absmax2")},
                }
                super().update_step(group, part, gindex, pindex)
                del self.state[part]
            state["step"] += 1

    return InParts


def _bitsandbytes(plan: Plan) -> Any:
    try:
        from bitsandbytes import optim
    except ImportError as error:
        raise PlanError(package_of_optimizer(plan.job.train.optimizer).problem(first_line(error))) from None
    return optim
