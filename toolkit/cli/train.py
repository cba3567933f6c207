"""`toolkit train`: from a job file to a checkpoint and an export."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.cli.elastic import after_restart, agents_code, begin_in, elastic_plan, forget_earlier
from toolkit.cli.on_hosts import HostfileOption, HostsOption, train_on_hosts
from toolkit.cli.options import JobArgument, JsonOption, SetOption
from toolkit.cli.output import print_fields, print_json, say, warn
from toolkit.cli.proofs import prove_before_start
from toolkit.cli.summary import plan_fields
from toolkit.cli.train_checks import check_dry_run, check_start, checked_plan, startable_plan
from toolkit.cli.train_plan import fastest_plan
from toolkit.cli.train_report import Call, complete_line, export_finished, finish_complete, is_finished, report
from toolkit.errors import INTERRUPTED_EXIT_CODE

if TYPE_CHECKING:
    from pathlib import Path

    from toolkit.launch.identity import WorkerIdentity
    from toolkit.launch.outcome import RunOutcome
    from toolkit.launch.place import Node
    from toolkit.planning.plan import Plan
    from toolkit.trainer.limits import Limits


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(train)


def train(
    job: JobArgument,
    overrides: SetOption = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            metavar="DIR|latest|auto",
            help="Resume from a checkpoint; `latest`: from output_dir's latest; `auto`: from its last undamaged one, "
            "or start if there is none, so that the same command can be repeated. --resume_from_checkpoint is the "
            "same.",
        ),
    ] = None,
    resume_from_checkpoint: Annotated[
        str | None, typer.Option("--resume_from_checkpoint", "--resume-from-checkpoint", hidden=True)
    ] = None,
    no_convert: Annotated[
        bool,
        typer.Option(
            "--no-convert",
            help="Refuse a checkpoint of other ranks, stages, strategy or offload, whose state is otherwise taken over.",
        ),
    ] = False,
    stop_after: Annotated[
        int | None,
        typer.Option("--stop-after", metavar="STEP", min=1, help="Save and end after this step, to resume later."),
    ] = None,
    max_hours: Annotated[
        float | None,
        typer.Option(
            "--max-hours",
            metavar="HOURS",
            min=0.001,
            help="Save and end, with exit code 75, before so many hours have passed.",
        ),
    ] = None,
    save_on_signal: Annotated[
        float | None,
        typer.Option(
            "--save-on-signal",
            metavar="SECONDS",
            min=0.1,
            help="Time from a signal to end to the kill that follows, as on a spot instance: what cannot be saved within it is left out.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and show what would run, without starting it.")
    ] = False,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Delete the checkpoints, metrics and export in output_dir."),
    ] = False,
    no_export: Annotated[
        bool, typer.Option("--no-export", help="Write no safetensors to output_dir/export at the end.")
    ] = False,
    as_is: Annotated[
        bool,
        typer.Option(
            "--as-is",
            help="Take the fixed defaults for what the job leaves open, instead of the fastest settings for these cards.",
        ),
    ] = False,
    elastic: Annotated[
        bool,
        typer.Option(
            "--elastic",
            help="Under torchrun with --nnodes MIN:MAX: run on as many nodes as there are, with the job's global batch, from the last "
            "checkpoint. Start it with --max-restarts, and a node that is lost or comes back restarts the ranks on the others.",
        ),
    ] = False,
    hosts: HostsOption = None,
    hostfile: HostfileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Fine-tune a model as the job file says: on this machine's cards, or on CPU with `cluster: {gpu: cpu}`.

    On cards, what the job leaves open is chosen first: the fastest settings that fit them and keep its numbers.

    Ctrl-C, or SIGTERM, SIGHUP or SIGUSR2 from a scheduler, ends the current step, saves a checkpoint and shows how
    to go on; SIGUSR1 saves one and goes on. Under torchrun, `deepspeed`, `accelerate launch`, or srun and mpirun with a process a
    rank, this command is one of their ranks; as the one process of a node it starts that node's. One run at a time has an output_dir.

    Example: `toolkit train job.yaml --set train.max_steps=100`, `toolkit train job.yaml --hosts node1:8,node2:8`

    JSON keys: exit_code, interrupted, plan, log_dir, failure, checkpoint, export, hub, next_command (how to go on, to repeat
    an export that failed, or to export weights alone, from which no run resumes; null when there is nothing left to do).
    """
    resume = _one_resume(resume, resume_from_checkpoint, overwrite=overwrite)
    if elastic and overwrite:
        raise typer.BadParameter(
            "it goes on from the last checkpoint, which --overwrite would delete", param_hint="--elastic"
        )
    if hosts is not None or hostfile is not None:
        train_on_hosts(job, overrides, hosts, hostfile, elastic=elastic, as_json=as_json)
    plan = checked_plan(job, overrides)
    resume, overwrite = after_restart(resume, overwrite=overwrite, elastic=elastic, output_dir=plan.output_dir)
    call = Call(
        job=job,
        overrides=tuple(overrides or ()),
        resume=resume,
        convert=not no_convert,
        stop_after=stop_after,
        max_hours=max_hours,
        save_on_signal=save_on_signal,
        no_export=no_export,
        as_is=as_is,
    )
    limits = call.limits()
    if elastic:
        plan = elastic_plan(plan)
    place = _place(plan)
    if place is None and not as_is:
        plan = fastest_plan(plan, job, resume=resume)
    if dry_run:
        _show(plan, call, place, overwrite=overwrite, as_json=as_json)
        return
    raise typer.Exit(_run(plan, call, limits, place, overwrite=overwrite, elastic=elastic, as_json=as_json))


def _run(
    plan: Plan,
    call: Call,
    limits: Limits,
    place: WorkerIdentity | Node | None,
    *,
    overwrite: bool,
    elastic: bool,
    as_json: bool,
) -> int:
    """Train as what this process is to the plan, and return the exit code; a rank ends here."""
    from toolkit.cli.launching import run_node_again
    from toolkit.launch.output_lock import hold_output
    from toolkit.launch.place import Node
    from toolkit.launch.signals import Interrupt
    from toolkit.trainer.worker import leave, run_rank

    if isinstance(place, Node):
        return run_node_again(plan, place, limits)
    if place is not None and place.rank:  # rank 0 alone checks and writes before all of them meet
        code = run_rank(
            lambda: startable_plan(plan, call.resume, alone=False)[0],
            resume=call.resume,
            convert=call.convert,
            limits=limits,
            go_on=lambda code: _go_on(plan, call, code, as_json=as_json),
        )
        leave(agents_code(code))
    with Interrupt(), hold_output(plan.output_dir):
        forget_earlier(plan.output_dir, elastic=elastic)
        code = _train(
            plan, call, limits, under_launcher=place is not None, overwrite=overwrite, elastic=elastic, as_json=as_json
        )
    if place is not None:
        leave(agents_code(code))
    return code


def _one_resume(resume: str | None, resume_from_checkpoint: str | None, *, overwrite: bool) -> str | None:
    """Return the checkpoint given by either option: ours, or the name that transformers uses."""
    if resume is not None and resume_from_checkpoint is not None:
        raise typer.BadParameter(
            "it is the same option as --resume: give one of the two", param_hint="--resume_from_checkpoint"
        )
    named = resume_from_checkpoint if resume is None else resume
    if named is not None and overwrite:
        raise typer.BadParameter("--overwrite and --resume are mutually exclusive", param_hint="--overwrite")
    return named


def _train(
    plan: Plan, call: Call, limits: Limits, *, under_launcher: bool, overwrite: bool, elastic: bool, as_json: bool
) -> int:
    """Train, export and report, as this machine's launcher or as rank 0 of another; return the exit code."""
    from toolkit.checkpoint.discovery import recover, remove_leftovers
    from toolkit.checkpoint.resume import AUTO, resume_point
    from toolkit.launch.accelerators import accelerator_warnings
    from toolkit.launch.outcome import RunOutcome
    from toolkit.launch.software import software_warnings
    from toolkit.planning.plan_warnings import plan_warnings
    from toolkit.trainer.checks import check_stop_after, guard_output, space_warnings
    from toolkit.trainer.worker import run_rank

    if call.resume is not None:
        recover(plan.output_dir)
    plan, changes = startable_plan(plan, call.resume, alone=not under_launcher)
    warn(changes)
    point = resume_point(plan, call.resume, say=say, convert=call.convert)
    if point is not None and point.is_complete:
        if under_launcher:  # the other ranks wait for this one
            run_rank(lambda: plan, resume=call.resume)
        remove_leftovers(plan.output_dir)
        return finish_complete(plan, point, no_export=call.no_export, as_json=as_json)
    check_stop_after(call.stop_after, 0 if point is None else point.state.step)
    if not under_launcher:
        check_start(plan)
    warn([*plan_warnings(plan), *accelerator_warnings(plan), *software_warnings(plan), *space_warnings(plan)])
    warn(call.warnings(plan))
    if not under_launcher:
        prove_before_start(plan)
    guard_output(plan, resuming=call.resume is not None, overwrite=overwrite, exports=not call.no_export)
    if under_launcher:
        begin_in(plan.output_dir, elastic=elastic)
        plan.save(plan.output_dir / "plan.json")
        code = run_rank(
            lambda: plan,
            resume=call.resume,
            convert=call.convert,
            limits=limits,
            go_on=lambda code: _go_on(plan, call, code, as_json=as_json),
        )
        outcome = RunOutcome(exit_code=code, interrupted=code == INTERRUPTED_EXIT_CODE, failure=None)
    else:
        resume = str(point.folder) if point is not None and call.resume != AUTO else call.resume
        outcome = run_workers(plan, resume=resume, convert=call.convert, limits=limits, job=call.job)
    exported = None
    if outcome.exit_code == 0 and not call.no_export and is_finished(plan):
        exported = export_finished(plan)
    return report(plan, outcome, call=call, exported=exported, as_json=as_json)


def _go_on(plan: Plan, call: Call, code: int, *, as_json: bool) -> None:
    """Print how to go on with a run that hangs, on a rank of another launcher, before its process ends."""
    from toolkit.launch.outcome import RunOutcome

    outcome = RunOutcome(exit_code=code, interrupted=False, failure=None)
    report(plan, outcome, call=call, exported=None, as_json=as_json)


def run_workers(
    plan: Plan, *, resume: str | None, limits: Limits, convert: bool = True, job: Path | None = None
) -> RunOutcome:
    """Start one worker per rank and wait for them to end.

    Args:
        resume: Checkpoint to resume from, as `toolkit.trainer.loop.train` takes it.
        limits: What ends the session before its run.
        convert: Whether a checkpoint of another layout may be read.
        job: Job file, beside which modules of the user's are found.
    """
    from toolkit.artifacts.files import emit
    from toolkit.checkpoint.discovery import remove_leftovers
    from toolkit.cli.launching import log_folder, run_on_this_node, trainer_ranks
    from toolkit.launch.environment import python_module
    from toolkit.trainer.progress import describe_devices

    others = "" if plan.grid.world_size == 1 else f"; the other ranks write to {log_folder(plan)}"
    say(f"starting {describe_devices(plan)}{others} ...")
    emit(plan, plan.output_dir / "configs")
    argv = [*python_module("toolkit.trainer.worker"), "--plan", str(plan.output_dir / "plan.json")]
    argv += ["--log-dir", str(log_folder(plan)), *(["--resume", resume] if resume else [])]
    argv += [] if convert else ["--no-convert"]
    argv += limits.arguments()
    argv += ["--job", str(job)] if job else []
    # A rank saves when asked to; after another has failed there is nothing to wait for.
    outcome = run_on_this_node(
        plan,
        argv,
        when_asked="each rank finishes its step and saves",
        grace_seconds=0.0,
        trainer=trainer_ranks(plan, limits),
    )
    if outcome.exit_code != 0:
        # No worker lives any more; a partial checkpoint may fill the disk.
        remove_leftovers(plan.output_dir)
    return outcome


def _place(plan: Plan) -> WorkerIdentity | Node | None:
    """Return what this process is to the plan; a node's starter and rank 0 say how that was found.

    A rank's groups meet at MASTER_PORT, which is set here where the job names the port and the launcher does not.
    """
    from toolkit.cli.launching import place_of
    from toolkit.launch.identity import WorkerIdentity
    from toolkit.launch.place import Node

    place = place_of(plan)
    if isinstance(place, WorkerIdentity) and place.master_port is not None:
        os.environ["MASTER_PORT"] = str(place.master_port)
    if isinstance(place, Node) or (place is not None and place.rank == 0):
        say(place.describe())
    return place


def _show(plan: Plan, call: Call, place: WorkerIdentity | Node | None, *, overwrite: bool, as_json: bool) -> None:
    """Print what would run, and what would be refused."""
    from toolkit.checkpoint.compatibility import describe_changes, describe_layout
    from toolkit.checkpoint.resume import resume_point
    from toolkit.checkpoint.state import saved_plan
    from toolkit.trainer.checks import check_stop_after

    if call.resume is not None:
        plan, changes = startable_plan(plan, call.resume)
        warn(changes)
    point = resume_point(plan, call.resume, say=say, convert=call.convert)
    if point is not None and point.is_complete:
        warnings = []
    else:
        check_stop_after(call.stop_after, 0 if point is None else point.state.step)
        refused = check_dry_run(
            plan,
            resuming=call.resume is not None,
            overwrite=overwrite,
            exports=not call.no_export,
            launched=place is not None,
        )
        warnings = [*refused, *call.warnings(plan)]
    command = call.command(None if point is None else point.folder, overwrite=overwrite)
    if as_json:
        configuration = plan.deepspeed_config()
        print_json({"plan": plan.to_dict(), "deepspeed": configuration, "command": command, "warnings": warnings})
        return
    from toolkit.trainer.progress import describe_devices

    print_fields(plan_fields(plan))
    print(f"`{call.validate_command()}` shows the source and reason of every value\n")
    if point is not None and point.is_complete:
        print(complete_line(point))
        return
    print(f"would start {describe_devices(plan)} and write to {plan.output_dir}")
    if point is not None:
        print(f"would resume from {point.folder}")
        saved = saved_plan(point.folder)
        for told in (describe_changes(plan, saved), describe_layout(plan, saved)):
            if told:
                print(told)
    print(f"start with:  {command}")
    warn(warnings)
