"""Checks whether a plan can resume from a checkpoint, and what that changes; without torch, so before any process starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toolkit.checkpoint.fingerprint import source_problems
from toolkit.checkpoint.manifest import is_shard, verify
from toolkit.checkpoint.resume_rules import KEEPING_HOOKS, RULES, Rule
from toolkit.checkpoint.state import State, saved_plan, step_problems
from toolkit.deepspeed_spec.nested import leaf_values
from toolkit.errors import CheckpointError, Problem, raise_all, shortened
from toolkit.planning.plan import Plan

_DEEPSPEED = "deepspeed."


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A key whose value differs from the checkpoint's run, and its rule."""

    key: str
    now: Any
    then: Any
    rule: Rule

    @property
    def name(self) -> str:
        """Name of the key in messages."""
        return self.rule.name or self.key

    def __str__(self) -> str:
        return f"{self.name} {_shown(self.then)} → {_shown(self.now)}"


def check_resumable(plan: Plan, folder: Path, *, convert: bool = True) -> State:
    """Check all of a checkpoint but the contents of DeepSpeed's files, which the ranks compare before they load them.

    Args:
        plan: Plan that resumes.
        folder: Checkpoint folder.
        convert: Whether a checkpoint of another layout may be read.

    Returns:
        State of the saved run.

    Raises:
        CheckpointError: The checkpoint is absent, incomplete, damaged, or not of this plan.
    """
    manifest = verify(folder, unread=is_shard)
    state = State.load(folder)
    raise_all(CheckpointError, step_problems(folder, manifest, state))
    saved = saved_plan(folder)
    moved = source_problems(plan.job, saved.job, state.sources, folder)
    raise_all(CheckpointError, [*layout_problems(plan, saved, folder, convert=convert), *moved])
    return state


def known_num_steps(plan: Plan, folder: Path, state: State) -> int | None:
    """Return the length of the run if a plan resumes a checkpoint; None if only reading the data tells."""
    if plan.settings.max_steps is not None:
        return plan.settings.max_steps
    saved = saved_plan(folder).settings
    is_same = saved.max_steps is None and saved.num_train_epochs == plan.settings.num_train_epochs
    return state.num_steps if is_same else None


def layout_problems(plan: Plan, saved: Plan, folder: Path, *, convert: bool = True) -> list[Problem]:
    """Return the differences between a plan and a checkpoint's plan that a resume cannot make.

    Args:
        plan: Plan that resumes.
        saved: Plan of the checkpoint.
        folder: Checkpoint folder.
        convert: Whether a checkpoint of another layout may be read.
    """
    refused = [change for change in changes(plan, saved) if change.rule.on_change == "refused"]
    causes: dict[str, list[Change]] = {}
    for change in refused:
        causes.setdefault(change.rule.cause or change.key, []).append(change)
    problems = [_refused(together, folder) for together in causes.values()]
    if converted := layout_changes(plan, saved):
        problems += (
            [_other_layout(converted, folder)] if not convert else _unconvertible(converted, plan, saved, folder)
        )
    if saved.job.train.save_only_model:
        problems.insert(0, _weights_alone(folder))
    if plan.model.config != saved.model.config:
        changed = sorted(
            key
            for key in {*plan.model.config, *saved.model.config}
            if plan.model.config.get(key) != saved.model.config.get(key)
        )
        now, then = plan.model.config, saved.model.config
        values = [
            f"{key} {shortened(_shown(then.get(key)))} → {shortened(_shown(now.get(key)))}" for key in changed[:8]
        ]
        more = f" and {len(changed) - 8} more" if len(changed) > 8 else ""
        problems.append(
            Problem(
                code="CHECKPOINT_MODEL",
                key="model",
                message=f"{folder} has another model: {', '.join(values)}{more}",
                fix=f"Set model to {saved.model.name}, or leave out --resume and train into another output_dir",
            )
        )
    return problems


def layout_changes(plan: Plan, saved: Plan) -> list[Change]:
    """Return the changes for which a checkpoint's files are read weight by weight, as their layout is another."""
    return [change for change in changes(plan, saved) if change.rule.on_change == "converted"]


def _other_layout(changed: Sequence[Change], folder: Path) -> Problem:
    return Problem(
        code="CHECKPOINT_LAYOUT",
        key=changed[0].name,
        message=f"{folder} has another layout ({', '.join(map(str, changed))}), and convert=False (--no-convert) forbids reading it weight by weight",
        fix=f"Leave out --no-convert, or set {_back(changed)}",
    )


def _unconvertible(changed: Sequence[Change], plan: Plan, saved: Plan, folder: Path) -> list[Problem]:
    """Return why a state cannot go over to another layout bit by bit."""
    strategies = [each.job.parallel.strategy for each in (plan, saved)]
    rounds = strategies[0] == "ddp" != strategies[1] and plan.settings.dtype != "fp32"
    reasons = [*inexact(plan), *inexact(saved)]
    reasons += ["ddp in 16 bit keeps no fp32 copy of the weights, so those of the checkpoint would be rounded"] * rounds
    if saved.job.train.optimizer == "lion" and strategies[0] != strategies[1]:
        reasons.append("lion has other states under ddp and fsdp2 than under zero")
    return [
        Problem(
            code="CHECKPOINT_LAYOUT",
            key=changed[0].name,
            message=f"{folder} has another layout ({', '.join(map(str, changed))}), to which it cannot go over exactly: {why}",
            fix=f"Set {_back(changed)} to resume, or export it (`toolkit export {folder}`) and warm-start from the export",
        )
        for why in dict.fromkeys(reasons)
    ]


def inexact(plan: Plan) -> list[str]:
    """Return why the state of a run with this plan has no exact form without its layout; empty if it has."""
    parallel, optimizer = plan.job.parallel, plan.job.train.optimizer
    reasons: Mapping[str, bool] = {
        "8-bit states have a scale for each 256 numbers of a rank's part": "8bit" in optimizer,
        "schedule_free_adamw has counts of each parameter group": optimizer == "schedule_free_adamw",
        "lion under fsdp2 has states of each rank's own": optimizer == "lion" and parallel.strategy == "fsdp2",
        "a profile of NVMe has its states in swap files of its own layout": "nvme"
        in (plan.profile.optimizer, plan.profile.parameters),
        "optimizer-cpu-partial has two optimizers": plan.twin_flow,
        "a communication hook keeps on each rank what it has not sent yet": parallel.strategy == "ddp"
        and parallel.ddp_options.comm_hook in KEEPING_HOOKS,
    }
    return [why for why, holds in reasons.items() if holds]


def _back(changed: Sequence[Change]) -> str:
    return " and ".join(f"{change.name} to {_shown(change.then)}" for change in changed)


def describe_layout(plan: Plan, saved: Plan) -> str | None:
    """Return one line that says why a checkpoint is read weight by weight; None if it has the plan's own layout."""
    changed = layout_changes(plan, saved)
    if not changed:
        return None
    drawn = (
        ""
        if plan.grid == saved.grid
        else "; other ranks: dropout draws anew from train.seed, the step and the rank's place"
    )
    return (
        f"the checkpoint has another layout ({', '.join(map(str, changed))}): its state is read weight by weight{drawn}"
    )


def _weights_alone(folder: Path) -> Problem:
    return Problem(
        code="CHECKPOINT_WEIGHTS_ONLY",
        key=str(folder),
        message=f"{folder} was saved with save_only_model=true: it has no optimizer state to resume from",
        fix=f"For a warm start, export it (`toolkit export {folder}`), set model to the export, and train into another output_dir",
    )


def describe_changes(plan: Plan, saved: Plan) -> str | None:
    """Return one line with the changes to the checkpoint's run that take effect; None if nothing has changed."""
    told = [str(change) for change in changes(plan, saved) if change.rule.on_change == "told"]
    return f"resume changes {', '.join(told)}" if told else None


def _refused(changed: Sequence[Change], folder: Path) -> Problem:
    rule = changed[-1].rule
    now = " and ".join(f"{change.name}={_shown(change.now)}" for change in changed)
    then = " and ".join(_shown(change.then) for change in changed)
    return Problem(
        code=rule.code,
        key=changed[-1].name,
        message=f"{now}, but {folder} was saved with {then}: {rule.why}",
        fix=f"Set {_back(changed)} to resume, or export it (`toolkit export {folder}`) and warm-start from the export",
    )


def changes(now: Plan, then: Plan) -> Iterator[Change]:
    """Yield each changed key whose change is reported or refused, with its resolved values.

    Args:
        now: Plan that resumes.
        then: Plan of the checkpoint.
    """
    for key, rule in _rows(now, then):
        if rule.on_change in ("free", "content") or not rule.counts(now, then):
            continue
        values = [_value(plan, key, rule) for plan in (now, then)]
        if values[0] == values[1]:
            continue
        if rule.on_change in ("refused", "converted") and rule.fits(now, then):
            rule = replace(rule, on_change="told")
        yield Change(key=key, now=values[0], then=values[1], rule=rule)


def rule_of(key: str) -> Rule:
    """Return the rule of a key of the job, such as `train.learning_rate`, or of the section that it lies in."""
    while key not in RULES:
        key, dot, _ = key.rpartition(".")
        if not dot:
            raise KeyError(key)
    return RULES[key]


def _rows(now: Plan, then: Plan) -> Iterator[tuple[str, Rule]]:
    """Yield the rules of keys that can differ: of DeepSpeed's keys those that a job sets."""
    yield from ((key, rule) for key, rule in RULES.items() if rule.value or not key.startswith(_DEEPSPEED))
    sections = [plan.job.deepspeed for plan in (now, then)]
    written = sorted({f"{_DEEPSPEED}{path}" for section in sections for path, _ in leaf_values(section)})
    yield from ((key, rule) for key in written if not (rule := rule_of(key)).value)


def _value(plan: Plan, key: str, rule: Rule) -> Any:
    """Return a key's resolved value in a plan; None if it does not apply."""
    if rule.value is not None:
        return rule.value(plan)
    if key.startswith(_DEEPSPEED):
        return dict(leaf_values(plan.deepspeed_config())).get(key.removeprefix(_DEEPSPEED), rule.default)
    section, _, name = key.partition(".")
    if hasattr(plan.settings, name):
        return getattr(plan.settings, name)
    return getattr(getattr(plan.job, section), name, None)


def _shown(value: Any) -> str:
    return "null" if value is None else str(list(value) if isinstance(value, tuple) else value)
