"""The checks of `toolkit train` before it starts, without torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.errors import PlanError, RunError, ToolkitError, raise_all

if TYPE_CHECKING:
    from toolkit.planning.plan import Plan


def checked_plan(job: Path, overrides: list[str] | None) -> Plan:
    """Read a job and make every check that needs no torch, training's own included.

    Raises:
        SpecError, PlanError: With all problems at once.
    """
    from toolkit.cli.best_effort import check_file
    from toolkit.planning.trainable import data_section_problems, training_problems

    verdict = check_file(job, overrides)
    raise_all(PlanError, [*verdict.problems, *(data_section_problems(verdict.job) if verdict.job else ())])
    plan = verdict.plan
    assert plan is not None
    raise_all(PlanError, training_problems(plan.job, plan.model))
    return plan


def startable_plan(plan: Plan, resume: str | None = None, *, alone: bool = True) -> tuple[Plan, tuple[str, ...]]:
    """Keep a checkpoint's global batch on other ranks, and choose the optimizer that the job leaves open.

    That is the checkpoint's, or torch's fused AdamW if DeepSpeed's cannot be compiled.

    Args:
        plan: Resolved plan.
        resume: Folder of a checkpoint, `latest` or `auto`; None for a new run.
        alone: Whether this process starts all ranks: one of several cannot decide for other machines.

    Returns:
        The plan, and messages for the user about what was changed.
    """
    plan, kept = with_saved_batch(plan, resume)
    plan, changed = _with_startable_optimizer(plan, resume, alone=alone)
    return plan, (*kept, *changed)


def with_saved_batch(plan: Plan, resume: str | None) -> tuple[Plan, tuple[str, ...]]:
    """Return the plan with as many sequences in a step as the run had that it resumes, if only the ranks have changed that number."""
    from toolkit.checkpoint.resume import candidates
    from toolkit.checkpoint.state import saved_plan
    from toolkit.planning.resolve import with_train_batch

    for folder in candidates(plan.output_dir, resume):
        try:
            saved = saved_plan(folder)
        except ToolkitError:
            continue  # `resume_point` reports it
        before, batch = saved.settings.batch, plan.settings.batch
        keys = ("per_device_train_batch_size", "gradient_accumulation_steps", "train_batch_size")
        # What the job leaves open may have been chosen for the saved run.
        same = all(getattr(plan.job.train, key) in (None, getattr(saved.job.train, key)) for key in keys)
        if batch.train == before.train or batch.dp_size == before.dp_size or not same:
            return plan, ()
        try:
            made = with_train_batch(plan, before.train, f"that of {folder}, on {before.dp_size} data-parallel ranks")
        except ToolkitError:
            return plan, ()  # its ranks cannot share that batch, which `resume_point` refuses
        return made, (f"the global batch of {folder} is kept: {made.settings.batch}",)
    return plan, ()


def _with_startable_optimizer(plan: Plan, resume: str | None, *, alone: bool) -> tuple[Plan, tuple[str, ...]]:
    from toolkit.checkpoint.resume import AUTO, candidates
    from toolkit.config.job import TORCH_ADAMW
    from toolkit.launch.build_tools import unbuildable
    from toolkit.launch.builds import with_other_adamw
    from toolkit.planning.resolve import with_torch_adam

    if plan.job.train.optimizer != "adamw":
        return plan, ()
    for folder in candidates(plan.output_dir, resume):
        saved = _saved_optimizer(folder)
        if saved is None and resume == AUTO:
            continue  # it is skipped
        goes_over = saved in TORCH_ADAMW and not plan.uses_torch_adam
        return with_torch_adam(plan, f"{folder} was saved with it") if goes_over else plan, ()
    if not alone:
        return plan, ()
    lacking = unbuildable(plan)
    extensions = [extension for several in lacking.values() for extension in several]
    if len(extensions) != 1 or not extensions[0].replaceable:
        return plan, ()  # `check_start` reports them
    (missing,) = lacking
    made, said = with_other_adamw(plan, extensions[0].title, missing)
    return made, (said,)


def _saved_optimizer(folder: Path) -> str | None:
    """Return the optimizer of a checkpoint; None if it cannot be read, which `resume_point` reports."""
    from toolkit.checkpoint.state import saved_plan

    try:
        return saved_plan(folder).job.train.optimizer
    except ToolkitError:
        return None


def check_dry_run(plan: Plan, *, resuming: bool, overwrite: bool, exports: bool, launched: bool = False) -> list[str]:
    """Make the checks of a start without starting.

    Args:
        plan: Resolved plan.
        resuming: Whether a checkpoint is resumed.
        overwrite: Whether an earlier run is deleted.
        exports: Whether the finished run is exported into output_dir.
        launched: Whether a launcher says which node this is.

    Returns:
        Reasons why a start on this machine would be refused, and warnings: jobs are often checked on another machine.

    Raises:
        PlanError: OUTPUT_EXISTS, OUTPUT_WRITE, EXPORT_EXISTS.
        RunError: LAUNCH_NODES.
    """
    from toolkit.launch.accelerators import accelerator_warnings
    from toolkit.launch.build_tools import tool_problems
    from toolkit.launch.devices import card_problems
    from toolkit.launch.local import check_machine, check_nodes
    from toolkit.launch.output_lock import use_problems
    from toolkit.launch.packages import package_problems
    from toolkit.launch.software import software_warnings
    from toolkit.planning.plan_warnings import plan_warnings
    from toolkit.trainer.checks import output_problems, space_warnings

    raise_all(PlanError, output_problems(plan, resuming=resuming, overwrite=overwrite, exports=exports))
    if not launched:
        check_nodes(plan)
    cards = list(card_problems(plan))
    found = [*use_problems(plan.output_dir), *cards, *package_problems(plan)]
    changes: tuple[str, ...] = ()
    if not cards:  # with other cards this is not the machine that will compile
        startable, changes = startable_plan(plan)
        found += tool_problems(startable)
    try:
        check_machine(plan)
    except RunError as error:
        found += error.problems
    refused = [f"a start on this machine would be refused: {problem}" for problem in dict.fromkeys(found)]
    return [
        *refused,
        *changes,
        *plan_warnings(plan),
        *accelerator_warnings(plan),
        *software_warnings(plan),
        *space_warnings(plan),
    ]


def check_start(plan: Plan) -> None:
    """Raise the errors of a launch before anything is written or deleted.

    Raises:
        PlanError: FP8_PACKAGE, LOSS_LIGER_PACKAGE, KERNELS_PACKAGE, CLUSTER_SOFTWARE.
        RunError: BUILD_TOOLS, BUILD_LOCK, and those of `check_launchable`.
    """
    from toolkit.launch.builds import check_builds
    from toolkit.launch.local import check_launchable
    from toolkit.launch.packages import package_problems

    raise_all(PlanError, package_problems(plan))
    check_launchable(plan)
    check_builds(plan)
