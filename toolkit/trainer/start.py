"""How the ranks of a run begin together: one holds the output folder and says from where they go on, and all see it."""

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
    plan: Plan, world: World, *, resume: str | Path | None, held: ExitStack, say: Callable[[str], None]
) -> ResumePoint | None:
    """Takes the output folder, and finds out where the run goes on, the same on every rank; None: from its start.

    Args:
        plan: What runs.
        world: All ranks call this together.
        resume: As `toolkit.trainer.loop.train` takes it.
        held: Lets go of the folder when it is closed; rank 0 holds it.
        say: Takes, on rank 0, a word on each checkpoint that is passed over.

    Collectives:
        Two broadcasts and a gather of objects.

    Raises:
        PlanError: OUTPUT_EXISTS, OUTPUT_WRITE, OUTPUT_NOT_SHARED.
        RunError: OUTPUT_IN_USE.
        CheckpointError: What `resume` names is absent, damaged, or not of this plan.
    """

    def on_first_rank() -> ResumePoint | None:
        held.enter_context(hold_output(plan.output_dir))
        guard_output(plan, resuming=resume is not None, overwrite=False)
        if resume is not None:
            recover(plan.output_dir)
        return resume_point(plan, resume, say=say)

    # Where a file of the data was touched, all of it is read to see whether it is the same.
    found = run_with_heartbeat(world, lambda: on_first_rank() if world.is_main else None)
    point: ResumePoint | None = agree((lambda: found) if world.is_main else None, None)
    _check_shared(plan.output_dir, world)
    return point


def _check_shared(folder: Path, world: World) -> None:
    """Finds out before anything is trained that ranks do not share the output folder."""
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
