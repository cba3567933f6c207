"""Whether a plan can go on from a checkpoint; decided without torch, so before any process starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolkit.checkpoint.layout import PLAN, State
from toolkit.checkpoint.manifest import read_manifest, size_problems
from toolkit.checkpoint.sources import source_problems
from toolkit.errors import CheckpointError, Problem, raise_all
from toolkit.plan.plan import Plan


def check_resumable(plan: Plan, folder: Path) -> State:
    """Checks all of a checkpoint but its checksums, which the ranks compare while they load.

    Returns:
        Where the saved run stood.

    Raises:
        CheckpointError: The checkpoint is absent, incomplete, cut short, or not of this plan.
    """
    raise_all(CheckpointError, size_problems(folder, read_manifest(folder)))
    state = State.load(folder)
    saved = Plan.load(folder / PLAN)
    moved = source_problems(plan.job, saved.job, state.sources, folder)
    raise_all(CheckpointError, [*layout_problems(plan, folder, state), *moved])
    return state


def known_num_steps(plan: Plan, folder: Path, state: State) -> int | None:
    """Gives the length of the run that a plan would make of a checkpoint; None where only reading the data tells."""
    if plan.settings.max_steps is not None:
        return plan.settings.max_steps
    saved = Plan.load(folder / PLAN).settings
    is_same = saved.max_steps is None and saved.num_train_epochs == plan.settings.num_train_epochs
    return state.num_steps if is_same else None


def layout_problems(plan: Plan, folder: Path, state: State) -> list[Problem]:
    """Gives what differs between a plan and a checkpoint that this version cannot convert."""
    saved = Plan.load(folder / PLAN)
    problems: list[Problem] = []
    warm_start = f"or export it (`toolkit export {folder}`) and warm-start from the export"
    # Ranks and how they share the model change together: one cause, one problem.
    causes = [list(_grid_values(plan, saved, state)), *([value] for value in _shard_values(plan, saved, state))]
    for values in causes:
        differing = [(name, now, then) for name, now, then in values if now != then]
        if differing:
            problems.append(_other_layout(differing, folder, warm_start))
    for name, now, then in _order_values(plan, saved):
        if now != then:
            problems.append(
                Problem(
                    code="CHECKPOINT_DATA",
                    key=name,
                    message=f"{name}={now}, but {folder} was saved with {then}: its position would mean other documents",
                    fix=f"Set {name} to {then} to resume, {warm_start}",
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


def _other_layout(changed: list[tuple[str, Any, Any]], folder: Path, warm_start: str) -> Problem:
    return Problem(
        code="CHECKPOINT_LAYOUT",
        key=changed[-1][0],
        message=f"{' and '.join(f'{name}={now}' for name, now, _ in changed)}, but {folder} was saved with "
        f"{' and '.join(str(then) for _, _, then in changed)}: its shards fit that layout only",
        fix=f"Set {' and '.join(f'{name} to {then}' for name, _, then in changed)} to resume, {warm_start}",
        source="deepspeed runtime/engine.py load_checkpoint",
    )


def _grid_values(plan: Plan, saved: Plan, state: State) -> Iterator[tuple[str, Any, Any]]:
    """How many ranks wrote the files, and how they shared the model: name, value of the plan, value of the checkpoint."""
    yield "cluster.gpus_per_node × cluster.nodes", plan.grid.world_size, state.world_size
    yield "parallel.tensor", plan.grid.tp, saved.grid.tp
    yield "parallel.pipeline", plan.grid.pp, saved.grid.pp
    yield "parallel.virtual_stages", plan.settings.virtual_stages, saved.settings.virtual_stages


def _shard_values(plan: Plan, saved: Plan, state: State) -> Iterator[tuple[str, Any, Any]]:
    """What else the engine's files depend on: name, value of the plan, value of the checkpoint."""
    now, then = plan.job.train, saved.job.train
    yield "parallel.zero_stage", plan.settings.zero_stage, state.zero_stage
    if plan.settings.dtype != saved.settings.dtype:  # fp8 is in the products alone, not in what is saved
        yield "train.precision", plan.settings.precision, saved.settings.precision
    yield "train.method", now.method, then.method
    if now.method == then.method == "lora":
        yield "train.lora", _shown(now.lora), _shown(then.lora)
    yield "train.optimizer", now.optimizer, then.optimizer
    if bool(now.weight_decay) != bool(then.weight_decay):  # it divides the parameters into two groups
        yield "train.weight_decay", now.weight_decay, then.weight_decay
    yield "parallel.offload", plan.profile.name, saved.profile.name
    settled, before = plan.settings, saved.settings
    if (plan.grid.pp, settled.virtual_stages) == (saved.grid.pp, before.virtual_stages):  # else they are the cause
        yield "parallel.partition", list(settled.partition), list(before.partition)
    if settled.zero_stage != before.zero_stage:
        return
    if settled.zero_stage in (1, 2):  # which optimizer holds the master weights, and in which order
        # It follows the dtype: one cause, one problem. Over stages one optimizer does for all.
        if settled.dtype == before.dtype and plan.grid.pp == 1:
            name = "train.gradient_accumulation_dtype"
            yield name, settled.gradient_accumulation_dtype, before.gradient_accumulation_dtype
        yield "deepspeed.zero_optimization.round_robin_gradients", _round_robin(plan), _round_robin(saved)
    if settled.zero_stage == 3:  # the length of each flat group of master weights
        yield "deepspeed.zero_optimization.sub_group_size", settled.sub_group_size, before.sub_group_size


def _round_robin(plan: Plan) -> bool:
    """Gives the value that the engine uses (deepspeed runtime/zero/config.py: False when left out)."""
    return bool(plan.deepspeed_config()["zero_optimization"].get("round_robin_gradients", False))


def _order_values(plan: Plan, saved: Plan) -> Iterator[tuple[str, Any, Any]]:
    """What the order of the rows depends on: a step then is a position in the data."""
    batch, before = plan.settings.batch, saved.settings.batch
    if (batch.micro, batch.accumulation) != (
        before.micro,
        before.accumulation,
    ):  # else the number of ranks is the cause
        yield "train.train_batch_size", batch.train, before.train
    yield "train.sequence_length", plan.settings.sequence_length, saved.settings.sequence_length
    yield "train.seed", plan.job.train.seed, saved.job.train.seed
    now, then = plan.job.data, saved.job.data
    if now is None or then is None:
        return
    for name in ("name", "revision", "split", "validation_fraction", "format", "packing", "loss_on", "max_samples"):
        yield f"data.{name}", getattr(now, name), getattr(then, name)


def _shown(section: Any) -> Any:
    return None if section is None else section.model_dump(mode="json")
