"""Restoring of a run from a checkpoint, or the same error on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from toolkit.checkpoint.compatibility import (
    describe_changes,
    describe_layout,
    known_num_steps,
    layout_changes,
    layout_problems,
)
from toolkit.checkpoint.fingerprint import source_notes, source_problems
from toolkit.checkpoint.layout import tag_of
from toolkit.checkpoint.manifest import content_problems, damaged, read_manifest, share, size_problems
from toolkit.checkpoint.nvme_state import restore_unswapped
from toolkit.checkpoint.pickles import read_pickle
from toolkit.checkpoint.random_state import load_random_state, load_stream_state
from toolkit.checkpoint.state import State, saved_plan, step_problems
from toolkit.distributed.deepspeed_private import load_files_by, sort_by_rank, unite_optimizers
from toolkit.distributed.heartbeat import run_with_heartbeat
from toolkit.engine.run import Run
from toolkit.engine.seed import seed_random_state
from toolkit.engine.sharded_files import ENGINE_FILE
from toolkit.errors import CheckpointError, Problem, ToolkitError, raise_all
from toolkit.planning.state_bytes import leaves_frozen_out
from toolkit.topology.grid import Coordinate, Grid


def restore(
    run: Run, folder: Path, *, say: Callable[[str], None], across: Callable[[State], None], convert: bool = True
) -> State:
    """Load a checkpoint that `verify_together` has found sound.

    Args:
        run: A fresh run; all ranks call this together, once, before the first step.
        folder: Checkpoint folder.
        say: Called on rank 0 with a line that names what the plan changes, and one for what cannot be compared.
        across: Fills the engine from files of another layout.
        convert: Whether it may.

    Returns:
        State of the saved run.
    """
    state, saved = State.load(folder), saved_plan(folder)
    raise_all(CheckpointError, layout_problems(run.plan, saved, folder, convert=convert))
    lines = [describe_changes(run.plan, saved), describe_layout(run.plan, saved), *source_notes(state.sources)]
    for told in lines if run.world.is_main else ():
        if told is not None:
            say(told)
    if layout_changes(run.plan, saved) or _is_portable(run, folder, state):
        across(state)
    else:
        _load_engine(run, folder, tag_of(state.step))
    _restore_random_state(run, folder, saved.grid, state.step)
    run.step_count = state.step
    run.state = dict(state.hooks)
    num_steps = known_num_steps(run.plan, folder, state)
    if num_steps is not None:
        run.set_num_steps(num_steps)
    return state


def _is_portable(run: Run, folder: Path, state: State) -> bool:
    """Return whether a checkpoint of the run's layout has been converted into one of whole weights, which DeepSpeed does not read."""
    return run.plan.job.parallel.strategy == "zero" and (folder / tag_of(state.step) / ENGINE_FILE).exists()


def _restore_random_state(run: Run, folder: Path, saved: Grid, step: int) -> None:
    """Go on with each rank's random numbers, or on another grid with new ones, and with the position in a stream."""
    world = run.world
    if world.grid == saved:
        load_random_state(folder, rank=world.rank)
    else:
        seed, place = run.plan.job.train.seed, world.coordinate
        seed_random_state(seed, dp_rank=place.dp, pp_rank=place.pp, step=step)
    replicas = [saved.rank(Coordinate(pp=0, dp=dp_rank, tp=0)) for dp_rank in range(0, saved.dp, saved.cp)]
    run.stream_state = load_stream_state(folder, replicas)


def _load_engine(run: Run, folder: Path, tag: str) -> None:
    """Make the engine load its files; report what it cannot read as damage, even if every checksum is right."""
    is_deepspeed = run.plan.job.parallel.strategy == "zero"
    if is_deepspeed:
        sort_by_rank(run.engine)
        load_as_data(run.engine, folder)
    try:
        if run.plan.profile.optimizer == "nvme":
            restore_unswapped(run.engine, folder, tag)
        with run.keeping_hyperparameters():
            loaded, _ = run.engine.load_checkpoint(
                str(folder), tag=tag, load_module_strict=not leaves_frozen_out(run.plan)
            )
    except (LookupError, TypeError, AttributeError, ValueError, AssertionError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and type(error) is not RuntimeError:
            raise  # of the device, its memory or the network, not of the files
        raise CheckpointError(damaged(folder, tag, f"cannot be loaded: {error!r:.200}")) from error
    if loaded is None:
        raise CheckpointError(damaged(folder, tag, "has nothing that the engine loads"))
    if run.plan.twin_flow and (missing := unite_optimizers(run.engine.optimizer)):
        done = int(run.engine.global_steps) - int(run.engine.skipped_steps)
        if done:
            raise CheckpointError(_without_states(folder, missing, done))


def _without_states(folder: Path, missing: Sequence[int], done: int) -> Problem:
    """Return the problem of a checkpoint of Twin-Flow from before both of its optimizers were saved."""
    return Problem(
        code="CHECKPOINT_LAYOUT",
        key="parallel.offload",
        message=f"{folder} has done {done} steps and has no optimizer states of {len(missing)} sub-groups, those that the card steps under "
        "parallel.offload=optimizer-cpu-partial: DeepSpeed saves the CPU's alone, and so did this toolkit before 0.2.0",
        fix=f"Export it (`toolkit export {folder}`), set model to the export, and train into another output_dir",
        source="deepspeed runtime/zero/stage3.py _rigid_state_dict",
    )


def load_as_data(engine: Any, folder: Path) -> None:
    """Make an engine read a checkpoint's files by `read_pickle` instead of a `torch.load` that runs code they name."""

    def read(path: str, map_location: Any = None) -> dict[str, Any]:
        name = Path(path).relative_to(folder).as_posix()
        try:
            return read_pickle(folder, name, map_location=map_location)
        except ValueError as error:
            raise CheckpointError(damaged(folder, name, str(error))) from None

    load_files_by(engine, read)


def verify_together(run: Run, folder: Path) -> None:
    """Check sizes, checksums and pickles, each rank a share of the files, and raise the same error on all ranks.

    Raises:
        CheckpointError: As `load`.
    """
    # This may read all files of the checkpoint and, on one rank, all of the data.
    problems = run_with_heartbeat(run.world, lambda: _problems_seen(run, folder))
    found: list[list[Problem] | None] = [None] * run.world.size
    dist.all_gather_object(found, problems)
    unique = {(problem.code, problem.message): problem for part in found if part for problem in part}
    raise_all(CheckpointError, unique.values())


def _problems_seen(run: Run, folder: Path) -> list[Problem]:
    """Return what is wrong with this rank's share of a checkpoint, and on rank 0 with what the run reads."""
    try:
        manifest = read_manifest(folder)
        mine = share(manifest, rank=run.world.rank, world_size=run.world.size)
        problems = size_problems(folder, manifest) or content_problems(folder, manifest, mine)
        problems = problems or _pickle_problems(folder, mine)
        if problems or not run.world.is_main:
            return problems
        state = State.load(folder)
        moved = source_problems(run.plan.job, saved_plan(folder).job, state.sources, folder)
        return [*step_problems(folder, manifest, state), *moved]
    except ToolkitError as error:
        return list(error.problems)


def _pickle_problems(folder: Path, names: Iterable[str]) -> list[Problem]:
    """Read these files, with their tensors mapped: a refusal here is reported to all ranks."""
    problems: list[Problem] = []
    for name in names:
        if not name.endswith(".pt"):
            continue
        try:
            read_pickle(folder, name, mmap=True)
        except ValueError as error:
            problems.append(damaged(folder, name, str(error)))
        except CheckpointError as error:
            problems += error.problems
    return problems
