"""`toolkit train`: from a job file to a checkpoint and an export."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.cli.options import JobArgument, JsonOption, SetOption, read_job
from toolkit.cli.output import print_json
from toolkit.errors import PlanError, Problem, raise_all

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
            "--resume_from_checkpoint",
            "--resume-from-checkpoint",
            metavar="DIR|latest",
            help="Go on from a checkpoint, or from the latest of output_dir.",
        ),
    ] = None,
    stop_after: Annotated[
        int | None, typer.Option("--stop-after", min=1, help="End this session, saved, after so many steps of the run.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and show what would run; start nothing.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete the checkpoints and metrics that output_dir holds.")
    ] = False,
    export: Annotated[bool, typer.Option(help="Export safetensors to output_dir/export at the end.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Fine-tune a model as the job file says: on this machine's cards, or on CPU with `cluster: {gpu: cpu}`.

    Ctrl-C ends the current step, saves a checkpoint and shows how to go on. Under torchrun, `deepspeed` or
    `accelerate launch` this command is one of their ranks.

    Example: `toolkit train job.yaml --set train.max_steps=100`

    JSON keys: exit_code, interrupted, plan, log_dir, failure, checkpoint, export.
    """
    plan = checked_plan(job, overrides)
    checkpoint = _checkpoint(plan, resume)
    if dry_run:
        _show(plan, job, checkpoint, as_json=as_json)
        return
    if _is_worker():
        raise typer.Exit(_as_rank(plan, checkpoint, stop_after))
    guard_output(plan, resuming=checkpoint is not None, overwrite=overwrite)
    outcome = run_workers(plan, checkpoint=checkpoint, stop_after=stop_after)
    exported = None
    if outcome.exit_code == 0 and export and stop_after is None:
        exported = export_last(plan)
    report(plan, outcome, job=job, exported=exported, as_json=as_json)
    raise typer.Exit(outcome.exit_code)


def checked_plan(job: Path, overrides: list[str] | None) -> Plan:
    """Reads a job and makes every check that needs no torch, training's own included.

    Raises:
        SpecError, PlanError: With all problems at once.
    """
    from toolkit.cli.checking import check

    written = read_job(job, overrides)
    verdict = check(written)
    problems = [*verdict.problems]
    if written.data is None:
        problems.append(
            Problem(
                code="TRAIN_NO_DATA",
                key="data",
                message="the job has no data section: there is nothing to train on",
                fix="Add `data: {train: FILE}` with a .jsonl, .txt, .csv or .parquet file, or a hub id",
            )
        )
    raise_all(PlanError, problems)
    assert verdict.plan is not None
    raise_all(PlanError, weight_problems(verdict.plan))
    return verdict.plan


def weight_problems(plan: Plan) -> list[Problem]:
    """Says early what loading would say late: that there are no weights, or none that can be read."""
    from toolkit.spec.weights import find_weights

    model = plan.model
    if plan.settings.init == "random" or model.origin == "hub":
        return []
    if model.path is not None and Path(model.path).is_dir():
        found = find_weights(Path(model.path))
        if found.format == "bin":
            return [
                Problem(
                    code="WEIGHTS_BIN",
                    key="model",
                    message=f"{model.path} holds pytorch_model.bin, a pickle, and no safetensors",
                    fix="Convert it: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(FOLDER)",
                )
            ]
        if found.loadable:
            return []
    hub = f"the hub id {model.hub_id}" if model.hub_id else "a hub id"
    return [
        Problem(
            code="MODEL_NO_WEIGHTS",
            key="model",
            message=f"model={model.name} gives dimensions only: there are no weights to fine-tune",
            fix=f"Name {hub} or a folder with safetensors, or set model.init to random to train from scratch",
        )
    ]


def guard_output(plan: Plan, *, resuming: bool, overwrite: bool) -> None:
    """Keeps a new run from mixing with, or deleting, what an earlier one left in output_dir."""
    folder = plan.output_dir
    held = sorted(path.name for path in folder.glob("checkpoint-*"))
    if (folder / "metrics.jsonl").exists():
        held.append("metrics.jsonl")
    if resuming or not held:
        return
    if not overwrite:
        raise PlanError.of(
            code="OUTPUT_EXISTS",
            key="train.output_dir",
            message=f"output_dir={folder} holds an earlier run: {', '.join(held[:4])}{' ...' if len(held) > 4 else ''}",
            fix="Go on with --resume_from_checkpoint latest, choose another train.output_dir, or delete it with --overwrite",
        )
    for name in held:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.rmtree(folder / "export", ignore_errors=True)


def run_workers(plan: Plan, *, checkpoint: Path | None, stop_after: int | None) -> RunOutcome:
    """Starts one worker a rank and waits for their end."""
    from toolkit.cli.local_run import log_folder, run_on_this_node
    from toolkit.emit.files import emit

    emit(plan, plan.output_dir / "configs")
    argv = [sys.executable, "-m", "toolkit.train.worker", "--plan", str(plan.output_dir / "plan.json")]
    argv += ["--log-dir", str(log_folder(plan))]
    argv += ["--resume", str(checkpoint)] if checkpoint else []
    argv += ["--stop-after", str(stop_after)] if stop_after else []
    return run_on_this_node(plan, argv)


def export_last(plan: Plan) -> Path:
    """Exports the last checkpoint of a finished run to output_dir/export."""
    from toolkit.checkpoint.locate import latest_checkpoint
    from toolkit.export.checkpoint import export

    return export(latest_checkpoint(plan.output_dir), plan.output_dir / "export", overwrite=True).folder


def report(plan: Plan, outcome: RunOutcome, *, job: Path, exported: Path | None, as_json: bool) -> None:
    """Says how the run ended and what lies where, or how to go on."""
    from toolkit.cli.local_run import outcome_as_dict, print_failure

    print_failure(outcome)
    last = last_checkpoint(plan)
    if as_json:
        value: dict[str, Any] = outcome_as_dict(plan, outcome)
        value["checkpoint"] = None if last is None else str(last)
        value["export"] = None if exported is None else str(exported)
        print_json(value)
        return
    if outcome.exit_code != 0:
        sys.stderr.write(_how_to_go_on(job, last, interrupted=outcome.interrupted))
        return
    print(f"metrics     {plan.output_dir / 'metrics.jsonl'}")
    print(f"checkpoint  {last}")
    if exported is not None:
        print(f"export      {exported}")


def last_checkpoint(plan: Plan) -> Path | None:
    """Gives the last complete checkpoint of output_dir, if any."""
    from toolkit.checkpoint.locate import list_checkpoints

    found = list_checkpoints(plan.output_dir)
    return found[-1] if found else None


def _how_to_go_on(job: Path, last: Path | None, *, interrupted: bool) -> str:
    if last is None:
        return "Nothing was saved yet; start again with the same command.\n"
    what = "Interrupted" if interrupted else "The last complete checkpoint stays"
    command = shlex.join(["toolkit", "train", str(job), "--resume_from_checkpoint", str(last)])
    return f"{what}: {last}\nGo on with:  {command}\n"


def _checkpoint(plan: Plan, resume: str | None) -> Path | None:
    if resume is None:
        return None
    if resume != LATEST:
        return Path(resume)
    from toolkit.checkpoint.locate import latest_checkpoint

    return latest_checkpoint(plan.output_dir)


def _is_worker() -> bool:
    from toolkit.launch.environment import rank_from_environment

    return rank_from_environment(os.environ) is not None


def _as_rank(plan: Plan, checkpoint: Path | None, stop_after: int | None) -> int:
    from toolkit.launch.environment import rank_from_environment
    from toolkit.train.worker import main

    identity = rank_from_environment(os.environ)
    assert identity is not None
    plan_file = plan.output_dir / "plan.json"
    if identity.rank == 0:
        guard_output(plan, resuming=checkpoint is not None, overwrite=False)
    # Each rank writes the same bytes by an atomic rename, so none reads a half or has to wait.
    plan.save(plan_file)
    arguments = ["--plan", str(plan_file)]
    arguments += ["--resume", str(checkpoint)] if checkpoint else []
    arguments += ["--stop-after", str(stop_after)] if stop_after else []
    return main(arguments)


def _show(plan: Plan, job: Path, checkpoint: Path | None, *, as_json: bool) -> None:
    command = shlex.join(["toolkit", "train", str(job)])
    if as_json:
        print_json({"plan": plan.to_dict(), "deepspeed": plan.deepspeed_config(), "command": command})
        return
    print(plan.explain())
    print()
    print(f"would start {plan.grid.world_size} processes on {plan.gpu.name} and write to {plan.output_dir}")
    if checkpoint is not None:
        print(f"would resume from {checkpoint}")
    print(f"start with:  {command}")
