"""`toolkit train`: from a job file to a checkpoint and an export."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from toolkit.cli.options import JobArgument, JsonOption, SetOption, read_job
from toolkit.cli.output import print_fields, print_json
from toolkit.errors import (
    INTERRUPTED_EXIT_CODE,
    CheckpointError,
    PlanError,
    Problem,
    SpecError,
    ToolkitError,
    raise_all,
)

if TYPE_CHECKING:
    from toolkit.launch.outcome import RunOutcome
    from toolkit.plan.plan import Plan

LATEST = "latest"


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
    from toolkit.train.checks import guard_output

    resume = _one_resume(resume, resume_from_checkpoint, overwrite=overwrite)
    call = Call(job=job, overrides=tuple(overrides or ()), stop_after=stop_after, no_export=no_export)
    plan = checked_plan(job, overrides)
    if resume is not None and not dry_run:
        recover(plan.output_dir)
    checkpoint = _checkpoint(plan, resume, stop_after)
    if dry_run:
        _show(plan, call.command(checkpoint, overwrite=overwrite), checkpoint, as_json=as_json)
        return
    resuming = checkpoint is not None
    rank = _rank()
    if rank is None:
        check_start(plan)
    if not rank:
        guard_output(plan, resuming=resuming, overwrite=overwrite)
    if rank is not None:
        outcome = _run_as_rank(plan, checkpoint, stop_after)
        if rank != 0:
            _leave(outcome.exit_code)
    else:
        outcome = run_workers(plan, checkpoint=checkpoint, stop_after=stop_after)
    exported = None
    if outcome.exit_code == 0 and not no_export and is_finished(plan):
        exported = _export_or_explain(plan)
    report(plan, outcome, call=call, exported=exported, as_json=as_json)
    if rank is not None:
        _leave(outcome.exit_code)
    raise typer.Exit(outcome.exit_code)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What a person gave that the command to go on must repeat."""

    job: Path
    overrides: tuple[str, ...] = ()
    stop_after: int | None = None
    no_export: bool = False

    def command(self, checkpoint: Path | None = None, *, overwrite: bool = False, step: int = 0) -> str:
        """Gives the command as shell text.

        Args:
            checkpoint: Where it goes on.
            overwrite: Whether it replaces an earlier run.
            step: Optimizer steps that are done: a --stop-after that is reached is left out.
        """
        words = ["toolkit", "train", str(self.job)]
        for override in self.overrides:
            words += ["--set", override]
        words += ["--resume_from_checkpoint", str(checkpoint)] if checkpoint else []
        words += ["--overwrite"] if overwrite else []
        words += ["--stop-after", str(self.stop_after)] if (self.stop_after or 0) > step else []
        words += ["--no-export"] if self.no_export else []
        return shlex.join(words)


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


def checked_plan(job: Path, overrides: list[str] | None) -> Plan:
    """Reads a job and makes every check that needs no torch, training's own included.

    Raises:
        SpecError, PlanError: With all problems at once.
    """
    from toolkit.cli.checking import check
    from toolkit.spec.pretrained import weight_problems
    from toolkit.train.checks import data_section_problems

    written = read_job(job, overrides)
    verdict = check(written)
    raise_all(PlanError, [*verdict.problems, *data_section_problems(written)])
    plan = verdict.plan
    assert plan is not None
    weights = () if plan.settings.init == "random" else weight_problems(plan.model)
    raise_all(PlanError, [*weights, *tokenizer_problems(plan)])
    return plan


def tokenizer_problems(plan: Plan) -> tuple[Problem, ...]:
    """Says early that the job names no tokenizer."""
    from toolkit.train.tokenizer import tokenizer_source

    try:
        tokenizer_source(plan)
    except SpecError as error:
        return error.problems
    return ()


def check_start(plan: Plan) -> None:
    """Says before anything is written or deleted what the launch would say after.

    Raises:
        RunError: LAUNCH_NODES, PORT_IN_USE.
    """
    from toolkit.launch.local import check_launchable

    check_launchable(plan)


def run_workers(plan: Plan, *, checkpoint: Path | None, stop_after: int | None) -> RunOutcome:
    """Starts one worker a rank and waits for their end."""
    from toolkit.checkpoint.locate import remove_leftovers
    from toolkit.cli.local_run import log_folder, run_on_this_node
    from toolkit.emit.files import emit

    emit(plan, plan.output_dir / "configs")
    argv = [sys.executable, "-m", "toolkit.train.worker", "--plan", str(plan.output_dir / "plan.json")]
    argv += ["--log-dir", str(log_folder(plan))]
    outcome = run_on_this_node(plan, [*argv, *_session_options(checkpoint, stop_after)])
    if outcome.exit_code != 0:
        # No worker lives any more; half a checkpoint may be what fills the disk.
        remove_leftovers(plan.output_dir)
    return outcome


def is_finished(plan: Plan) -> bool:
    """Whether the last checkpoint of output_dir is that of the run's last step."""
    from toolkit.checkpoint.layout import State

    last = last_checkpoint(plan)
    if last is None:
        return False
    state = State.load(last)
    return state.num_steps is not None and state.step >= state.num_steps


def _export_or_explain(plan: Plan) -> Path | None:
    """Exports a finished run, or says why not: the run itself is safe either way."""
    from toolkit.cli.output import print_problems

    try:
        return export_last(plan)
    except ToolkitError as error:
        print_problems(error.problems, as_json=False)
        return None


def export_last(plan: Plan) -> Path:
    """Exports the last checkpoint of a finished run to output_dir/export."""
    from toolkit.checkpoint.locate import latest_checkpoint
    from toolkit.cli.export import load_exporter

    export = load_exporter()
    # The run's own processes have hashed this checkpoint a moment ago.
    return export(
        latest_checkpoint(plan.output_dir), plan.output_dir / "export", overwrite=True, verify_first=False
    ).folder


def report(plan: Plan, outcome: RunOutcome, *, call: Call, exported: Path | None, as_json: bool) -> None:
    """Says how the run ended and what lies where, or how to go on."""
    from toolkit.cli.local_run import outcome_as_dict, print_failure

    print_failure(outcome)
    last = last_checkpoint(plan)
    finished = outcome.exit_code == 0 and is_finished(plan)
    command = None if finished else _next_command(plan, call, last)
    if as_json:
        value: dict[str, Any] = outcome_as_dict(plan, outcome)
        value["checkpoint"] = None if last is None else str(last)
        value["export"] = None if exported is None else str(exported)
        value["next_command"] = command
        print_json(value)
        return
    if outcome.exit_code == 0:
        fields = [("metrics", str(plan.output_dir / "metrics.jsonl")), ("checkpoint", str(last))]
        print_fields(fields if exported is None else [*fields, ("export", str(exported))])
    if command is not None:
        what = f"{'Saved' if outcome.exit_code == 0 else 'The last complete checkpoint is'} {last}. Go on with:"
        print(f"{what if last else 'Nothing was saved yet. Start again with:'}\n  {command}", file=sys.stderr)


def last_checkpoint(plan: Plan) -> Path | None:
    """Gives the last complete checkpoint of output_dir that says where it stood, if any."""
    from toolkit.checkpoint.layout import State
    from toolkit.checkpoint.locate import list_checkpoints

    for folder in reversed(list_checkpoints(plan.output_dir)):
        try:
            State.load(folder)
        except CheckpointError:
            continue  # damaged: a report must not fail on it
        return folder
    return None


def _next_command(plan: Plan, call: Call, last: Path | None) -> str:
    from toolkit.checkpoint.layout import State
    from toolkit.train.checks import held_output

    if last is None:
        return call.command(overwrite=bool(held_output(plan.output_dir)))
    return call.command(last, step=State.load(last).step)


def _checkpoint(plan: Plan, resume: str | None, stop_after: int | None) -> Path | None:
    """Gives the checkpoint to go on from, checked as far as that needs no torch."""
    if resume is None:
        return None
    from toolkit.checkpoint.compatible import check_resumable
    from toolkit.checkpoint.locate import latest_checkpoint
    from toolkit.train.checks import check_stop_after

    folder = latest_checkpoint(plan.output_dir) if resume == LATEST else Path(resume)
    check_stop_after(stop_after, check_resumable(plan, folder).step)
    return folder


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


def _leave(code: int) -> NoReturn:
    """Ends a rank without waiting for threads of collectives in which other ranks may still be."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _show(plan: Plan, command: str, checkpoint: Path | None, *, as_json: bool) -> None:
    if as_json:
        print_json({"plan": plan.to_dict(), "deepspeed": plan.deepspeed_config(), "command": command})
        return
    from toolkit.train.progress import describe_devices

    print(plan.explain())
    print()
    print(f"would start {describe_devices(plan)} and write to {plan.output_dir}")
    if checkpoint is not None:
        print(f"would resume from {checkpoint}")
    print(f"start with:  {command}")
