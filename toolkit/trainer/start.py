"""The common start of a run's ranks: rank 0 locks the output folder and decides where they resume, and all agree."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from toolkit.checkpoint.discovery import recover
from toolkit.checkpoint.resume import ResumePoint, resume_point
from toolkit.checkpoint.shared import check_shared
from toolkit.distributed.heartbeat import run_with_heartbeat
from toolkit.distributed.world import World
from toolkit.launch.output_lock import hold_output
from toolkit.modeling.first_rank import agree
from toolkit.planning.plan import Plan
from toolkit.trainer.checks import guard_output


def begin_together(
    plan: Plan, world: World, *, resume: str | Path | None, convert: bool, held: ExitStack, say: Callable[[str], None]
) -> ResumePoint | None:
    """Lock the output folder and return where the run resumes, the same on every rank; None to start from the beginning.

    Args:
        plan: Resolved plan.
        world: All ranks; they call this together.
        resume: Checkpoint to resume from, as `toolkit.trainer.loop.train` takes it.
        convert: Whether one of another layout may be read.
        held: Stack that releases rank 0's lock of the folder when it is closed.
        say: Called on rank 0 with a line for each checkpoint that is skipped.

    Collectives:
        Two broadcasts and a gather of objects.

    Raises:
        PlanError: OUTPUT_EXISTS, OUTPUT_WRITE, OUTPUT_NOT_SHARED.
        RunError: OUTPUT_IN_USE.
        CheckpointError: The checkpoint of `resume` is absent, damaged, or not of this plan.
    """

    def on_first_rank() -> ResumePoint | None:
        held.enter_context(hold_output(plan.output_dir))
        guard_output(plan, resuming=resume is not None, overwrite=False, exports=False)
        if resume is not None:
            recover(plan.output_dir)
        return resume_point(plan, resume, say=say, convert=convert)

    # A data file with a new time of change is read completely to see whether it is the same.
    found = run_with_heartbeat(world, lambda: on_first_rank() if world.is_main else None)
    point: ResumePoint | None = agree((lambda: found) if world.is_main else None, None)
    _check_shared(plan.output_dir, world)
    return point


def _check_shared(folder: Path, world: World) -> None:
    """Raise before training if the ranks do not share the output folder."""
    if world.size == 1:
        return
    token: str = agree((lambda: _leave_token(folder)) if world.is_main else None, None)
    try:
        check_shared(folder, folder / token, world)
    finally:
        if world.is_main:
            (folder / token).unlink(missing_ok=True)


def _leave_token(folder: Path) -> str:
    name = f".shared-{secrets.token_hex(8)}"
    (folder / name).touch()
    return name
