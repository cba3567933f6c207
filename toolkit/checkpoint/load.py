"""Restores a run from a checkpoint, or says why it cannot, on every rank alike."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from toolkit.checkpoint.layout import PLAN, State, tag_of
from toolkit.checkpoint.manifest import checksum_problems, read_manifest, share, size_problems
from toolkit.checkpoint.random_state import load_random_state
from toolkit.checkpoint.save import leaves_frozen_out
from toolkit.engine.run import Run
from toolkit.errors import CheckpointError, Problem, ToolkitError
from toolkit.plan.plan import Plan


def load(run: Run, path: str | Path) -> State:
    """Restores model, optimizer, schedule, random states and position in the data.

    Args:
        run: A fresh run; all ranks call this together, once, before the first step.
        path: Folder that `save` wrote.

    Returns:
        Where the saved run stood.

    Collectives:
        One gather of what each rank found; the engine's own.

    Raises:
        CheckpointError: The checkpoint is absent, incomplete, damaged, or of another layout of ranks.
    """
    folder = Path(path)
    _verify_together(run, folder)
    state = State.load(folder)
    problems = layout_problems(run.plan, folder, state)
    if problems:
        raise CheckpointError(*problems)
    loaded, _ = run.engine.load_checkpoint(
        str(folder), tag=tag_of(state.step), load_module_strict=not leaves_frozen_out(run.plan)
    )
    if loaded is None:
        raise CheckpointError.of(
            code="CHECKPOINT_DAMAGED",
            key=str(folder),
            message=f"DeepSpeed found nothing to load in {folder / tag_of(state.step)}",
            fix="Resume from another checkpoint",
            source="deepspeed runtime/engine.py load_checkpoint",
        )
    load_random_state(folder, rank=run.world.rank)
    run.step_count = state.step
    if state.num_steps is not None:
        run.set_num_steps(state.num_steps)
    return state


def layout_problems(plan: Plan, folder: Path, state: State) -> list[Problem]:
    """Gives what differs between a plan and a checkpoint that this version cannot convert."""
    settings = plan.settings
    saved = Plan.load(folder / PLAN)
    problems = []
    warm_start = f"or export it (`toolkit export {folder}`) and warm-start from the export"
    for name, now, then in (
        ("cluster ranks", plan.grid.world_size, state.world_size),
        ("parallel.zero_stage", settings.zero_stage, state.zero_stage),
        ("train.precision", settings.precision, saved.settings.precision),
        ("train.method", plan.job.train.method, saved.job.train.method),
        ("train.optimizer", plan.job.train.optimizer, saved.job.train.optimizer),
        ("parallel.offload", plan.profile.name, saved.profile.name),
    ):
        if now != then:
            problems.append(
                Problem(
                    code="CHECKPOINT_LAYOUT",
                    key=name,
                    message=f"{name}={now}, but {folder} was saved with {then}: its shards fit that layout only",
                    fix=f"Set {name} to {then} to resume, {warm_start}",
                    source="deepspeed runtime/engine.py load_checkpoint",
                )
            )
    if plan.model.config != saved.model.config:
        changed = sorted(
            key
            for key in {*plan.model.config, *saved.model.config}
            if plan.model.config.get(key) != saved.model.config.get(key)
        )
        problems.append(
            Problem(
                code="CHECKPOINT_MODEL",
                key="model",
                message=f"{folder} holds another model: {', '.join(changed)} differ",
                fix=f"Set model to {saved.model.name}, or train into another output_dir",
            )
        )
    return problems


def _verify_together(run: Run, folder: Path) -> None:
    """Checks sizes and checksums, a share of the files a rank, and raises the same on all ranks."""
    problems: list[Problem]
    try:
        manifest = read_manifest(folder)
        mine = share(manifest, rank=run.world.rank, world_size=run.world.size)
        problems = size_problems(folder, manifest) or checksum_problems(folder, manifest, mine)
    except ToolkitError as error:
        problems = list(error.problems)
    found: list[list[Problem] | None] = [None] * run.world.size
    dist.all_gather_object(found, problems)
    unique = {(problem.code, problem.message): problem for part in found if part for problem in part}
    if unique:
        raise CheckpointError(*unique.values())
