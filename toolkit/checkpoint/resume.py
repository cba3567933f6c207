"""The checkpoint that a run resumes from: the one that is named, its last, or the last valid one; needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from toolkit.checkpoint.best import stopped_early
from toolkit.checkpoint.compatibility import check_resumable, known_num_steps
from toolkit.checkpoint.discovery import latest_checkpoint, list_checkpoints, without_manifest
from toolkit.checkpoint.layout import step_of
from toolkit.checkpoint.state import State, is_readable
from toolkit.errors import CheckpointError
from toolkit.planning.plan import Plan

LATEST, AUTO = "latest", "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """The point from which a run resumes.

    Args:
        folders: Checkpoints in order of preference, each skipped only if its files turn out damaged.
        state: State of the first of them.
        num_steps: Optimizer steps of the run; None if only reading the data tells.
        ended_early: Whether the run ended before, as `train.early_stopping_patience` says.
    """

    folders: tuple[Path, ...]
    state: State
    num_steps: int | None
    ended_early: bool = False

    @property
    def folder(self) -> Path:
        """Preferred checkpoint."""
        return self.folders[0]

    @property
    def is_complete(self) -> bool:
        """True if no step is left to do."""
        return self.ended_early or (self.num_steps is not None and self.state.step >= self.num_steps)


def candidates(output_dir: Path, resume: str | Path | None) -> tuple[Path, ...]:
    """Return the checkpoints that a run may resume from, in order of preference.

    Args:
        output_dir: Output folder of the run.
        resume: A folder; `latest`; `auto` for each that is there, the latest first; None for none.

    Raises:
        CheckpointError: CHECKPOINT_NONE for `latest` if there is none.
    """
    if resume is None:
        return ()
    if resume == LATEST:
        return (latest_checkpoint(output_dir),)
    if resume == AUTO:
        return _latest_first(output_dir)
    return (Path(resume),)


def resume_point(
    plan: Plan, resume: str | Path | None, *, say: Callable[[str], None], convert: bool = True
) -> ResumePoint | None:
    """Return the first checkpoint that is valid, as far as can be checked without torch; None to start from the beginning.

    Args:
        plan: Plan that resumes.
        resume: As `candidates` takes it.
        say: Called with a line for each damaged one that `auto` skips.
        convert: Whether one of another layout may be read.

    Raises:
        CheckpointError: One is absent, not of this plan, or damaged and not skipped.
    """
    folders = candidates(plan.output_dir, resume)
    for index, folder in enumerate(folders):
        try:
            state = check_resumable(plan, folder, convert=convert)
        except CheckpointError as error:
            skip_damaged(error, skips=resume == AUTO, say=say)
            continue
        return ResumePoint(
            folders=folders[index:],
            state=state,
            num_steps=known_num_steps(plan, folder, state),
            ended_early=stopped_early(plan, state.hooks),
        )
    return None


def skip_damaged(error: CheckpointError, *, skips: bool, say: Callable[[str], None]) -> None:
    """Report that a damaged checkpoint is skipped; raise the error if it is not damage, or skipping is not allowed."""
    if not skips or not set(error.codes) <= {"CHECKPOINT_DAMAGED", "CHECKPOINT_INCOMPLETE"}:
        raise error
    say(f"warning: {error.problems[0].message}; it is skipped")


def _latest_first(output_dir: Path) -> tuple[Path, ...]:
    """Return what has a checkpoint's name, the one saved last first; those whose time is unknown, by their step."""
    ordered: list[Path] = []
    for folder in reversed((*without_manifest(output_dir), *list_checkpoints(output_dir))):
        place = len(ordered)
        if not is_readable(folder):
            steps = [step_of(other) or 0 for other in ordered]
            place = next((index for index, step in enumerate(steps) if step < (step_of(folder) or 0)), place)
        ordered.insert(place, folder)
    return tuple(ordered)


def set_aside(output_dir: Path) -> None:
    """Rename the checkpoints of a run that starts again because none is valid: its new ones would replace them."""
    for folder in (*without_manifest(output_dir), *list_checkpoints(output_dir)):
        number, target = 0, folder.with_name(f"damaged-{folder.name}")
        while target.exists():
            number += 1
            target = folder.with_name(f"damaged-{folder.name}-{number}")
        folder.rename(target)
