"""Layouts of one tiny run: the same weights, the same rows in each step, on other ranks and engines."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from ranks import leave_group
from tiny_plans import LENGTH, tiny_plan

import toolkit as tk
from toolkit.checkpoint.state import State, saved_plan
from toolkit.planning.plan import Plan
from toolkit.reshape.saved import SavedState, open_saved

ROWS = 8  # of a step, over all ranks
SAVED_AFTER, STEPS = 2, 4
Course = list[tuple[float, float | None]]  # loss and gradient norm of the steps after the save


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What may differ between the run that saves and the one that goes on."""

    pp: int = 1
    dp: int = 1
    tp: int = 1
    parallel: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return self.pp * self.dp * self.tp

    def plan(self, architecture: str, train: Mapping[str, Any], config: Mapping[str, Any]) -> Plan:
        """The plan of a run with this layout; what is trained is said by the others."""
        share = ROWS // self.dp
        micro = 1 if self.pp > 1 else min(2, share)
        values = {
            "per_device_train_batch_size": micro,
            "gradient_accumulation_steps": share // micro,
            "learning_rate": 0.02,
        }
        own = {"zero_stage": None} if "strategy" in self.parallel else {"zero_stage": 1}
        sizes = {"pipeline": self.pp, "tensor": self.tp}
        parallel = {key: value for key, value in {**own, **sizes, **self.parallel}.items() if value is not None}
        return tiny_plan(
            architecture,
            ranks=self.ranks,
            parallel={"zero_stage": None, **parallel},
            train={**values, "weight_decay": 0.1, "warmup_steps": 3, "lr_scheduler_type": "linear", **train},
            config=dict(config),
        )


def steps_of(run: Any, steps: Sequence[int]) -> Course:
    """Do some steps of the run; each has the same rows on any number of ranks."""
    found: Course = []
    batch, rank = run.plan.settings.batch, run.world.coordinate.dp
    for step in steps:
        draw = torch.Generator().manual_seed(step)
        ids_RS = torch.randint(3, 40, (ROWS, LENGTH), generator=draw)
        labels_RS = torch.where(torch.rand((ROWS, LENGTH), generator=draw) < 0.7, ids_RS, -100)
        own = range(rank * ROWS // batch.dp_size, (rank + 1) * ROWS // batch.dp_size, batch.micro)
        batches = [
            {"input_ids": ids_RS[at : at + batch.micro], "labels": labels_RS[at : at + batch.micro]} for at in own
        ]
        found.append((float(run.step(batches)), run.gradient_norm))
    return found


def save_each(rank: int, root: str, plans: Mapping[str, Plan]) -> dict[str, Any]:
    """Train with each plan, save, and go on: the courses that runs of other layouts must take."""
    results: dict[str, Any] = {}
    leave_group()
    for name, plan in plans.items():
        try:
            with tk.initialize(plan) as run:
                steps_of(run, range(SAVED_AFTER))
                tk.save(run, Path(root) / name)
                results[name] = steps_of(run, range(SAVED_AFTER, STEPS))
        except Exception:
            results[name] = traceback.format_exc()
    return results


def resume_each(rank: int, root: str, resumed: Sequence[tuple[str, str, Plan]]) -> dict[str, Any]:
    """Load each checkpoint, by its name, into a run of another layout, save that at once under the other name, and go on."""
    results: dict[str, Any] = {}
    leave_group()
    for saved, name, plan in resumed:
        try:
            with tk.initialize(plan) as run:
                said: list[str] = []
                tk.load(run, Path(root) / saved, say=said.append)
                tk.save(run, Path(root) / name)
                results[name] = (steps_of(run, range(SAVED_AFTER, STEPS)), said)
        except Exception:
            results[name] = traceback.format_exc()
    return results


def save_and_resume(
    rank: int, root: str, plans: Mapping[str, Plan], resumed: Sequence[tuple[str, str, Plan]]
) -> dict[str, Any]:
    """Both of the above in one launch."""
    return save_each(rank, root, plans) | resume_each(rank, root, resumed)


def opened(folder: Path) -> SavedState:
    return open_saved(folder, saved_plan(folder), State.load(folder), trust_remote_code=False)


def differences(one: Path, other: Path) -> list[str]:
    """What two checkpoints have of other values: weights, fp32 copies, states, counts."""
    first, second = opened(one), opened(other)
    found = [] if first.schedule_steps == second.schedule_steps else ["schedule"]
    if first.parts.keys() != second.parts.keys():
        return [*found, f"{first.parts.keys()} {second.parts.keys()}"]
    for kind in first.parts:
        names = [names_of(each, kind) for each in (first, second)]
        found += [f"{kind} of {name}" for name in names[0].keys() ^ names[1].keys()]
        for name in names[0].keys() & names[1].keys():
            values = [
                each.parts[kind].read(own[name], torch.float32)
                for each, own in zip((first, second), names, strict=True)
            ]
            if not torch.equal(*values):
                found.append(f"{kind} of {name}")
            if kind == "master" and first.steps.get(names[0][name]) != second.steps.get(names[1][name]):
                found.append(f"steps of {name}")
    return found


def names_of(saved: SavedState, kind: str) -> dict[str, str]:
    """Trained weights of the whole model: a stage's copy of a tied weight is the weight."""
    tied = saved.opened.tied
    return {
        tied.get(name, name): name
        for name in sorted(saved.parts[kind].tensors, key=lambda name: name in tied, reverse=True)
    }
