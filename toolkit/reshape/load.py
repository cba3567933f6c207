"""Restoring of a run from a checkpoint of its own layout or of another one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from toolkit.arguments import checks_arguments
from toolkit.checkpoint.load import restore, verify_together
from toolkit.checkpoint.state import State, saved_plan
from toolkit.engine.run import Run
from toolkit.reshape.fill import Progress, fill
from toolkit.reshape.saved import open_saved

_log = logging.getLogger(__name__)


@checks_arguments
def load(run: Run, path: str | Path, *, convert: bool = True, say: Callable[[str], None] = _log.warning) -> State:
    """Restore model, optimizer, schedule, random states and position in the data.

    The settings of optimizer, schedule and clipping in the run's plan apply from the next step on, whatever the saved
    run had. A checkpoint of another layout (ranks, stages, strategy, ZeRO stage, offload) is read weight by weight.

    Args:
        run: A fresh run; all ranks call this together, once, before the first step.
        path: Checkpoint folder that `save` wrote.
        convert: Whether a checkpoint of another layout may be read.
        say: Called on rank 0 with a line that names what the plan changes, and one for what cannot be compared.

    Returns:
        State of the saved run.

    Collectives:
        One gather of what each rank found; the engine's own.

    Raises:
        CheckpointError: The checkpoint is absent, incomplete, damaged, not of this plan, or more than data.
    """
    verify_together(run, Path(path))
    return resume(run, Path(path), convert=convert, say=say)


def resume(
    run: Run, folder: Path, *, convert: bool, say: Callable[[str], None], progress: Progress | None = None
) -> State:
    """Load a checkpoint that `verify_together` has found sound.

    Args:
        run: As of `load`, like the next three.
        folder: Checkpoint folder.
        convert: Whether a checkpoint of another layout may be read.
        say: Called on rank 0 with each line.
        progress: Called with weights read and their total, where the layout is another.

    Returns:
        State of the saved run.

    Collectives:
        The engine's own.

    Raises:
        CheckpointError: As `load`, but for what `verify_together` finds; on this rank alone if its files cannot be read.
    """

    def read_across(state: State) -> None:
        saved = open_saved(folder, saved_plan(folder), state, trust_remote_code=run.plan.job.model.trust_remote_code)
        fill(run, saved, progress=progress)

    return restore(run, folder, say=say, across=read_across, convert=convert)
