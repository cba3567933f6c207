"""`toolkit profile`: where the time of a job's step goes, from a few steps on this machine."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import typer

from toolkit.cli.options import JobArgument, JsonOption, SetOption
from toolkit.cli.output import new_table, print_json, print_table, say

if TYPE_CHECKING:
    from pathlib import Path

    from toolkit.launch.outcome import RunOutcome
    from toolkit.planning.plan import Plan


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(profile)


def profile(job: JobArgument, overrides: SetOption = None, as_json: JsonOption = False) -> None:
    """Run a few steps of a job on this machine and show where their time goes; nothing is trained on or saved.

    `train.profile` says which steps; the traces, for TensorBoard and Perfetto, go to the folder of output_dir's name with
    `-profile` after it.

    Example: `toolkit profile job.yaml`, `toolkit profile job.yaml --set train.profile={active: 5}`

    JSON keys: exit_code, folder, device, steps, step_seconds, memory_snapshot, categories (name, seconds of a step, share
    of their sum), operations (name, category, calls, seconds of a step).
    """
    from toolkit.cli.launching import print_failure
    from toolkit.cli.train_checks import check_start, checked_plan, startable_plan
    from toolkit.cli.train_plan import fastest_plan
    from toolkit.trainer.checks import PROFILE_FOLDER, PROFILE_SUMMARY

    plan = profiled_plan(startable_plan(fastest_plan(checked_plan(job, overrides), job))[0])
    check_start(plan)
    folder = plan.output_dir / PROFILE_FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    outcome = _run(plan, job)
    if outcome.exit_code != 0:
        print_failure(outcome)
        raise typer.Exit(outcome.exit_code)
    found: dict[str, Any] = json.loads((folder / PROFILE_SUMMARY).read_text(encoding="utf-8"))
    if as_json:
        print_json({"exit_code": 0, "folder": str(folder), **found})
        return
    _show(found, folder)


def profiled_plan(plan: Plan) -> Plan:
    """Return the plan of the profiled steps alone: its length, its folder, and nothing that a run does beside its steps."""
    from toolkit.config.job import Profile
    from toolkit.planning.resolve import resolve_with

    settings = plan.job.train.profile or Profile()
    count = (settings.wait + settings.warmup + settings.active) * settings.repeat
    folder = plan.output_dir.with_name(f"{plan.output_dir.name}-profile")
    changed = plan.job.with_(
        {
            "train.profile": settings,
            "train.output_dir": str(folder),
            "train.max_steps": count,
            "train.num_train_epochs": None,
            "train.saves_per_epoch": None,
            "train.evals_per_epoch": None,
            "train.warmup_steps": None,
            "train.callbacks": None,
            "train.report_to": None,
        }
    )
    return resolve_with(changed, model=plan.model, gpu=plan.gpu)


def _run(plan: Plan, job: Path) -> RunOutcome:
    from toolkit.cli.launching import log_folder, run_on_this_node
    from toolkit.launch.environment import python_module
    from toolkit.trainer.progress import describe_devices

    say(f"profiling {plan.settings.max_steps} steps on {describe_devices(plan)} ...")
    argv = [*python_module("toolkit.trainer.profile_worker"), "--plan", str(plan.output_dir / "plan.json")]
    argv += ["--log-dir", str(log_folder(plan)), "--job", str(job)]
    return run_on_this_node(plan, argv)


def _show(found: dict[str, Any], folder: Path) -> None:
    table = new_table(("category", "ms of a step", "share"), right=("ms of a step", "share"))
    for row in found["categories"]:
        table.add_row(row["name"], f"{row['seconds'] * 1e3:.2f}", f"{row['share']:.1%}")
    print_table(table)
    longest = new_table(("operation", "category", "calls", "ms of a step"), right=("calls", "ms of a step"))
    for row in found["operations"][:10]:
        longest.add_row(row["name"], row["category"], f"{row['calls']:g}", f"{row['seconds'] * 1e3:.2f}")
    print_table(longest)
    where = "on the processor" if found["device"] == "cpu" else "on the card"
    print(f"{found['steps']} steps of {found['step_seconds'] * 1e3:.2f} ms; the times are those of rank 0 {where}")
    memory = "" if found["memory_snapshot"] else "; no snapshot of memory, which torch takes on CUDA cards alone"
    print(f"traces: {folder}{memory}")
