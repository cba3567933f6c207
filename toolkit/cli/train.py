"""`toolkit train`: from a job file to a checkpoint and an export."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.cli.options import JobArgument, JsonOption, SetOption
from toolkit.cli.output import print_fields, print_json, warn
from toolkit.cli.summary import plan_fields
from toolkit.cli.train_checks import (
    ResumePoint,
    check_dry_run,
    check_start,
    checked_plan,
    resume_point,
    startable_plan,
)
from toolkit.cli.train_end import Call, complete_line, export_finished, finish_complete, is_finished, report, say
from toolkit.errors import INTERRUPTED_EXIT_CODE

if TYPE_CHECKING:
    from toolkit.launch.outcome import RunOutcome
    from toolkit.plan.plan import Plan


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(train)


def train(
    job: JobArgument,
    overrides: SetOption = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            metavar="DIR|latest",
            help="Go on from a checkpoint, or from output_dir's latest; --resume_from_checkpoint is the same.",
        ),
    ] = None,
    resume_from_checkpoint: Annotated[
        str | None, typer.Option("--resume_from_checkpoint", "--resume-from-checkpoint", hidden=True)
    ] = None,
    stop_after: Annotated[
        int | None,
        typer.Option(
            "--stop-after", metavar="STEP", min=1, help="Save and end at this step of the run, to go on later."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and show what would run; start nothing.")] = False,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Delete the checkpoints, metrics and export that output_dir holds."),
    ] = False,
    no_export: Annotated[
        bool, typer.Option("--no-export", help="Write no safetensors to output_dir/export at the end.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Fine-tune a model as the job file says: on this machine's cards, or on CPU with `cluster: {gpu: cpu}`.

    Ctrl-C ends the current step, saves a checkpoint and shows how to go on. Under torchrun, `deepspeed` or
    `accelerate launch` this command is one of their ranks.

    Example: `toolkit train job.yaml --set train.max_steps=100`

    JSON keys: exit_code, interrupted, plan, log_dir, failure, checkpoint, export, next_command (how to go on; null when
    there is nothing left to do).
    """
    from toolkit.checkpoint.locate import recover
    from toolkit.train.checks import check_stop_after
    from toolkit.train.worker import leave

    resume = _one_resume(resume, resume_from_checkpoint, overwrite=overwrite)
    call = Call(job=job, overrides=tuple(overrides or ()), stop_after=stop_after, no_export=no_export)
    plan = checked_plan(job, overrides)
    rank = _rank()
    if resume is not None and not dry_run:
        recover(plan.output_dir)
    if resume is not None or not dry_run:
        plan, changes = startable_plan(plan, resume, alone=rank is None)
        warn(changes)
    point = resume_point(plan, resume)
    if point is not None and point.is_complete and not dry_run:
        if not rank:
            finish_complete(plan, point, no_export=no_export, as_json=as_json)
        return
    if point is not None and not point.is_complete:
        check_stop_after(stop_after, point.step)
    if dry_run:
        _show(plan, call, point, overwrite=overwrite, as_json=as_json)
        return
    outcome = _run(plan, None if point is None else point.folder, rank=rank, stop_after=stop_after, overwrite=overwrite)
    if rank:
        leave(outcome.exit_code)
    exported = None
    if outcome.exit_code == 0 and not no_export and is_finished(plan):
        exported = export_finished(plan)
    report(plan, outcome, call=call, exported=exported, as_json=as_json)
    if rank is not None:
        leave(outcome.exit_code)
    raise typer.Exit(outcome.exit_code)


def _one_resume(resume: str | None, resume_from_checkpoint: str | None, *, overwrite: bool) -> str | None:
    """Gives the checkpoint that was named by either option: ours, or transformers' name for it."""
    if resume is not None and resume_from_checkpoint is not None:
        raise typer.BadParameter(
            "it is the same option as --resume; leave out one of the two", param_hint="--resume_from_checkpoint"
        )
    named = resume_from_checkpoint if resume is None else resume
    if named is not None and overwrite:
        raise typer.BadParameter(
            "a run that goes on deletes nothing; leave out one of the two", param_hint="--overwrite"
        )
    return named


def _run(
    plan: Plan, checkpoint: Path | None, *, rank: int | None, stop_after: int | None, overwrite: bool
) -> RunOutcome:
    """Trains: as all ranks of this machine, or as the one that a launcher made of this process."""
    from toolkit.plan.stage_parts import bubble_warning
    from toolkit.train.checks import guard_output, space_warnings

    if rank is None:
        check_start(plan)
    if not rank:
        warn([*bubble_warning(plan), *space_warnings(plan)])
        guard_output(plan, resuming=checkpoint is not None, overwrite=overwrite)
    if rank is not None:
        return _run_as_rank(plan, checkpoint, stop_after)
    return run_workers(plan, checkpoint=checkpoint, stop_after=stop_after)


def run_workers(plan: Plan, *, checkpoint: Path | None, stop_after: int | None) -> RunOutcome:
    """Starts one worker a rank and waits for their end."""
    from toolkit.checkpoint.locate import remove_leftovers
    from toolkit.cli.local_run import log_folder, run_on_this_node
    from toolkit.emit.files import emit
    from toolkit.launch.environment import python_module
    from toolkit.train.progress import describe_devices

    others = "" if plan.grid.world_size == 1 else f"; ranks past the first write to {log_folder(plan)}"
    say(f"starting {describe_devices(plan)}{others} ...")
    emit(plan, plan.output_dir / "configs")
    argv = [*python_module("toolkit.train.worker"), "--plan", str(plan.output_dir / "plan.json")]
    argv += ["--log-dir", str(log_folder(plan))]
    outcome = run_on_this_node(
        plan, [*argv, *_session_options(checkpoint, stop_after)], when_asked="each rank ends its step and saves"
    )
    if outcome.exit_code != 0:
        # No worker lives any more; half a checkpoint may be what fills the disk.
        remove_leftovers(plan.output_dir)
    return outcome


def _session_options(checkpoint: Path | None, stop_after: int | None) -> list[str]:
    options = ["--resume", str(checkpoint)] if checkpoint else []
    return options + (["--stop-after", str(stop_after)] if stop_after else [])


def _rank() -> int | None:
    """Gives the rank of this process where a launcher started it."""
    from toolkit.launch.environment import rank_from_environment

    identity = rank_from_environment(os.environ)
    return None if identity is None else identity.rank


def _run_as_rank(plan: Plan, checkpoint: Path | None, stop_after: int | None) -> RunOutcome:
    """Trains as one rank of torchrun, `deepspeed` or `accelerate launch`."""
    from toolkit.launch.outcome import RunOutcome
    from toolkit.train.worker import main

    plan_file = plan.output_dir / "plan.json"
    # Each rank writes the same bytes by an atomic rename, so none reads a half or has to wait.
    plan.save(plan_file)
    code = main(["--plan", str(plan_file), *_session_options(checkpoint, stop_after)])
    return RunOutcome(exit_code=code, interrupted=code == INTERRUPTED_EXIT_CODE, failure=None)


def _show(plan: Plan, call: Call, point: ResumePoint | None, *, overwrite: bool, as_json: bool) -> None:
    """Says what would run, and what would be refused."""
    is_complete = point is not None and point.is_complete
    warnings = [] if is_complete else check_dry_run(plan, resuming=point is not None, overwrite=overwrite)
    command = call.command(None if point is None else point.folder, overwrite=overwrite)
    if as_json:
        configuration = plan.deepspeed_config()
        print_json({"plan": plan.to_dict(), "deepspeed": configuration, "command": command, "warnings": warnings})
        return
    from toolkit.train.progress import describe_devices

    print_fields(plan_fields(plan))
    print(f"`{call.validate_command()}` says where every value comes from, and why\n")
    if point is not None and point.is_complete:
        print(complete_line(point))
        return
    print(f"would start {describe_devices(plan)} and write to {plan.output_dir}")
    if point is not None:
        print("\n".join([f"would resume from {point.folder}", *([point.changes] if point.changes else [])]))
    print(f"start with:  {command}")
    warn(warnings)
