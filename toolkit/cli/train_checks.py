"""What `toolkit train` checks before it starts, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.errors import PlanError, Problem, RunError, SpecError, raise_all

if TYPE_CHECKING:
    from toolkit.plan.plan import Plan

LATEST = "latest"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """Where a run goes on.

    Args:
        folder: The checkpoint.
        step: Optimizer steps done in it.
        num_steps: Optimizer steps of the run; None where only reading the data tells.
        saved_at: Seconds since the epoch.
        changes: What the job changes, in one line, if anything.
    """

    folder: Path
    step: int
    num_steps: int | None
    saved_at: float
    changes: str | None

    @property
    def is_complete(self) -> bool:
        """Whether no step is left to do."""
        return self.num_steps is not None and self.step >= self.num_steps


def checked_plan(job: Path, overrides: list[str] | None) -> Plan:
    """Reads a job and makes every check that needs no torch, training's own included.

    Raises:
        SpecError, PlanError: With all problems at once.
    """
    from toolkit.cli.salvage import check_file
    from toolkit.spec.pretrained import weight_problems
    from toolkit.train.checks import data_section_problems

    verdict = check_file(job, overrides)
    raise_all(PlanError, [*verdict.problems, *(data_section_problems(verdict.job) if verdict.job else ())])
    plan = verdict.plan
    assert plan is not None
    weights = () if plan.settings.init == "random" else weight_problems(plan.model)
    raise_all(PlanError, [*weights, *_tokenizer_problems(plan)])
    return plan


def _tokenizer_problems(plan: Plan) -> tuple[Problem, ...]:
    """Says early that the job names no tokenizer."""
    from toolkit.train.tokenizer import tokenizer_source

    try:
        tokenizer_source(plan)
    except SpecError as error:
        return error.problems
    return ()


def resume_point(plan: Plan, resume: str | None) -> ResumePoint | None:
    """Gives the checkpoint to go on from, checked as far as that needs no torch.

    Args:
        plan: What is to go on.
        resume: Its folder, or `latest`; None for a new run.

    Raises:
        CheckpointError: It is absent, damaged, or not of this plan.
    """
    if resume is None:
        return None
    from toolkit.checkpoint.compatible import check_resumable, describe_changes, known_num_steps
    from toolkit.checkpoint.locate import latest_checkpoint
    from toolkit.checkpoint.state import saved_plan

    folder = latest_checkpoint(plan.output_dir) if resume == LATEST else Path(resume)
    state = check_resumable(plan, folder)
    return ResumePoint(
        folder=folder,
        step=state.step,
        num_steps=known_num_steps(plan, folder, state),
        saved_at=state.saved_at,
        changes=describe_changes(plan, saved_plan(folder)),
    )


def check_dry_run(plan: Plan, *, resuming: bool, overwrite: bool) -> list[str]:
    """Makes the checks of a start without starting.

    Returns:
        What a start on this machine would be refused for, or warned of: jobs are often checked on another than they run on.

    Raises:
        PlanError: OUTPUT_EXISTS, OUTPUT_WRITE.
        RunError: LAUNCH_NODES.
    """
    from toolkit.launch.devices import card_problems
    from toolkit.launch.local import check_machine, check_one_node
    from toolkit.launch.packages import package_problems
    from toolkit.plan.stage_parts import bubble_warning
    from toolkit.train.checks import output_problems, space_warnings

    raise_all(PlanError, output_problems(plan, resuming=resuming, overwrite=overwrite))
    check_one_node(plan)
    found = [*card_problems(plan), *package_problems(plan)]
    try:
        check_machine(plan)
    except RunError as error:
        found += error.problems
    refused = [f"a start on this machine would be refused: {problem}" for problem in dict.fromkeys(found)]
    return [*refused, *bubble_warning(plan), *space_warnings(plan)]


def check_start(plan: Plan) -> None:
    """Says before anything is written or deleted what the launch would say after.

    Raises:
        PlanError: FP8_PACKAGE, LOSS_LIGER_PACKAGE, KERNELS_PACKAGE.
        RunError: As `check_launchable`.
    """
    from toolkit.launch.local import check_launchable
    from toolkit.launch.packages import package_problems

    raise_all(PlanError, package_problems(plan))
    check_launchable(plan)
