"""From which checkpoint a run goes on: the one that is named, its last, or the last sound one; needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from toolkit.checkpoint.compatibility import check_resumable, known_num_steps
from toolkit.checkpoint.discovery import latest_checkpoint, list_checkpoints
from toolkit.checkpoint.layout import step_of
from toolkit.checkpoint.state import State, is_readable
from toolkit.errors import CheckpointError
from toolkit.planning.plan import Plan

LATEST, AUTO = "latest", "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """Where a run goes on.

    Args:
        folders: Checkpoints, first choice first, each passed over only where its files turn out damaged.
        state: Where the first of them stood.
        num_steps: Optimizer steps of the run; None where only reading the data tells.
    """

    folders: tuple[Path, ...]
    state: State
    num_steps: int | None

    @property
    def folder(self) -> Path:
        """The checkpoint."""
        return self.folders[0]

    @property
    def is_complete(self) -> bool:
        """Whether no step is left to do."""
        return self.num_steps is not None and self.state.step >= self.num_steps


def candidates(output_dir: Path, resume: str | Path | None) -> tuple[Path, ...]:
    """Return the checkpoints that a run may go on from, first choice first.

    Args:
        output_dir: Of the run.
        resume: A folder; `latest`; `auto`: each that is complete, the latest first; None: none.

    Raises:
        CheckpointError: CHECKPOINT_NONE for `latest` where there is none.
    """
    if resume is None:
        return ()
    if resume == LATEST:
        return (latest_checkpoint(output_dir),)
    if resume == AUTO:
        return _latest_first(output_dir)
    return (Path(resume),)


def resume_point(plan: Plan, resume: str | Path | None, *, say: Callable[[str], None]) -> ResumePoint | None:
    """The first checkpoint that is sound, as far as a look without torch tells; None for a run from its start.

    Args:
        plan: What is to go on.
        resume: As `candidates` takes it.
        say: Takes a word on each damaged one that `auto` passes over.

    Raises:
        CheckpointError: One is absent, not of this plan, or damaged and not passed over.
    """
    folders = candidates(plan.output_dir, resume)
    for index, folder in enumerate(folders):
        try:
            state = check_resumable(plan, folder)
        except CheckpointError as error:
            skip_damaged(error, skips=resume == AUTO, say=say)
            continue
        return ResumePoint(folders=folders[index:], state=state, num_steps=known_num_steps(plan, folder, state))
    return None


def skip_damaged(error: CheckpointError, *, skips: bool, say: Callable[[str], None]) -> None:
    """Says that a checkpoint is passed over; raises what is wrong with it where that is not damage, or it may not be."""
    if not skips or set(error.codes) != {"CHECKPOINT_DAMAGED"}:
        raise error
    say(f"warning: {error.problems[0].message}; it is passed over")


def _latest_first(output_dir: Path) -> tuple[Path, ...]:
    """Return the complete checkpoints of a run, the one saved last first; those that cannot say when, by their step."""
    ordered: list[Path] = []
    for folder in reversed(list_checkpoints(output_dir)):
        place = len(ordered)
        if not is_readable(folder):
            steps = [step_of(other) or 0 for other in ordered]
            place = next((index for index, step in enumerate(steps) if step < (step_of(folder) or 0)), place)
        ordered.insert(place, folder)
    return tuple(ordered)


def set_aside(output_dir: Path) -> None:
    """Renames the checkpoints of a run that begins anew because none is sound: its own would replace them."""
    for folder in list_checkpoints(output_dir):
        number, target = 0, folder.with_name(f"damaged-{folder.name}")
        while target.exists():
            number += 1
            target = folder.with_name(f"damaged-{folder.name}-{number}")
        folder.rename(target)
