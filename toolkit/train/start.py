"""How the ranks of a run begin together: one holds the output folder and says from where they go on, and all see it."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from toolkit.checkpoint.compatible import known_num_steps
from toolkit.checkpoint.locate import recover
from toolkit.checkpoint.resume import AUTO, candidates, first_sound
from toolkit.errors import PlanError
from toolkit.groups.patience import patiently
from toolkit.groups.world import World
from toolkit.launch.output_lock import hold_output
from toolkit.modeling.agreement import agree
from toolkit.plan.plan import Plan
from toolkit.train.checks import guard_output

# NFS clients may keep what they know of a folder for as long (acdirmin, man 5 nfs), unless they list it.
SEEN_WITHIN_SECONDS = 30.0
_LONGEST_PAUSE_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """From where a run goes on.

    Args:
        folders: Checkpoints, first choice first, each passed over only where its files turn out damaged; none: from the start.
        step: Optimizer steps done in the first.
        num_steps: Of the run; None where only reading the data tells.
    """

    folders: tuple[Path, ...] = ()
    step: int = 0
    num_steps: int | None = None

    @property
    def is_complete(self) -> bool:
        """Whether no step is left to do."""
        return bool(self.folders) and self.num_steps is not None and self.step >= self.num_steps


def begin_together(
    plan: Plan, world: World, *, resume: str | Path | None, held: ExitStack, say: Callable[[str], None]
) -> Start:
    """Takes the output folder, and finds out from where the run goes on; the same on every rank.

    Args:
        plan: What runs.
        world: All ranks call this together.
        resume: As `toolkit.train.loop.train` takes it.
        held: Lets go of the folder when it is closed; rank 0 holds it.
        say: Takes, on rank 0, a word on each checkpoint that is passed over.

    Collectives:
        Two broadcasts and a gather of objects.

    Raises:
        PlanError: OUTPUT_EXISTS, OUTPUT_WRITE, OUTPUT_NOT_SHARED.
        RunError: OUTPUT_IN_USE.
        CheckpointError: What `resume` names is absent, damaged, or not of this plan.
    """

    def on_first_rank() -> Start:
        held.enter_context(hold_output(plan.output_dir))
        guard_output(plan, resuming=resume is not None, overwrite=False)
        if resume is not None:
            recover(plan.output_dir)
        folders, state = first_sound(plan, candidates(plan.output_dir, resume), skips=resume == AUTO, say=say)
        if state is None:
            return Start()
        return Start(folders=folders, step=state.step, num_steps=known_num_steps(plan, folders[0], state))

    # Where a file of the data was touched, all of it is read to see whether it is the same.
    found = patiently(world, lambda: on_first_rank() if world.is_main else Start())
    start: Start = agree((lambda: found) if world.is_main else None, None)
    check_shared(plan.output_dir, world)
    return start


def check_shared(folder: Path, world: World, *, within_seconds: float = SEEN_WITHIN_SECONDS) -> None:
    """Refuses an output folder that is not one for all ranks: each of them writes its part of a checkpoint there.

    Rank 0 writes a file that the others must see.

    Args:
        folder: As each rank finds it.
        world: All ranks call this together.
        within_seconds: How long a rank looks for the file.

    Raises:
        PlanError: OUTPUT_NOT_SHARED.
    """
    if world.size == 1:
        return
    token = agree((lambda: _leave_token(folder)) if world.is_main else None, None)
    error = None
    try:
        if not world.is_main and not _sees(folder / token, within_seconds):
            error = PlanError.of(
                code="OUTPUT_NOT_SHARED",
                key="train.output_dir",
                message=f"output_dir={folder} of rank {world.rank} on {socket.gethostname()} is not that of rank 0: each rank "
                "writes its part of a checkpoint there",
                fix="Set train.output_dir to a folder of a file system that all nodes share, such as NFS or Lustre, under one "
                "path",
            )
        world.agree(error)
    finally:
        if world.is_main:
            (folder / token).unlink(missing_ok=True)


def _leave_token(folder: Path) -> str:
    name = f".shared-{secrets.token_hex(8)}"
    (folder / name).touch()
    return name


def _sees(path: Path, within_seconds: float) -> bool:
    deadline, pause = time.monotonic() + within_seconds, 0.05
    while not path.exists():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        for folder in (path.parent.parent, path.parent):
            with suppress(OSError):
                any(folder.iterdir())  # makes an NFS client ask again what is in it
    return True
