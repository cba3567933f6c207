"""`toolkit quickstart`: all stages of a job on a fresh machine, offline, in under two minutes."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.cli.options import JsonOption
from toolkit.cli.output import print_fields, print_json, warn
from toolkit.errors import PlanError, RunError, raise_all
from toolkit.io import make_folder
from toolkit.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from toolkit.planning.plan import Plan

STEPS = 60
FIRST_SESSION = 40

# The marker identifies a folder as ours; --overwrite deletes what this command writes and nothing else.
MARKER = ".toolkit-quickstart"
WRITTEN = ("job.yaml", "python-topics.jsonl", "model", "run")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(quickstart)


def quickstart(
    out: Annotated[Path, typer.Option("--out", help="Folder to work in.")] = Path("quickstart"),
    processes: Annotated[int, typer.Option("--processes", min=1, help="Data-parallel processes on CPU.")] = 2,
    zero_stage: Annotated[int, typer.Option("--zero-stage", min=0, max=3, help="ZeRO stage.")] = 2,
    cpu: Annotated[bool, typer.Option("--cpu", help="Use the CPU even if there are GPUs.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Overwrite the folder.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Plan, train, save, resume, export and reload a small Llama on English text, offline.

    Uses two GPUs over NCCL (or one, if there is one), else two CPU processes over gloo. The text is Python's own
    documentation; the tokenizer is trained on it.

    Example: `toolkit quickstart --out /tmp/quickstart`

    JSON keys: job, plan, metrics, checkpoint, export, first_loss, last_loss, logits_difference, seconds.
    """
    began = time.perf_counter()
    _claim(out, overwrite=overwrite)
    _say(1, "writing a model, a tokenizer and a data set", as_json)
    job = write_quickstart_job(out, cpu=cpu, processes=processes, zero_stage=zero_stage)
    from toolkit.cli.train import run_workers
    from toolkit.cli.train_checks import check_start, checked_plan, startable_plan
    from toolkit.cli.train_report import Call, report
    from toolkit.trainer.limits import Limits
    from toolkit.trainer.progress import describe_devices

    plan, changes = startable_plan(checked_plan(job, None))
    check_start(plan)
    _say(
        2,
        f"planned {describe_devices(plan)}, ZeRO-{zero_stage}; `toolkit validate {job} --explain` gives the reasons",
        as_json,
    )
    warn(changes)
    _say(3, f"training {FIRST_SESSION} of {STEPS} steps", as_json)
    outcome = run_workers(plan, resume=None, limits=Limits(stop_after=FIRST_SESSION))
    if outcome.exit_code == 0:
        checkpoint = plan.output_dir / f"checkpoint-{FIRST_SESSION}"
        _say(4, f"resuming from {checkpoint}", as_json)
        plan, _ = startable_plan(plan, str(checkpoint))
        outcome = run_workers(plan, resume=str(checkpoint), limits=Limits())
    if outcome.exit_code != 0:
        report(plan, outcome, call=Call(job=job), exported=None, as_json=as_json)
        raise typer.Exit(outcome.exit_code)
    _say(5, "exporting safetensors, reloading them, comparing scores", as_json)
    _finish(plan, job, as_json=as_json, began=began)


def write_quickstart_job(out: Path, *, cpu: bool, processes: int, zero_stage: int) -> Path:
    """Write model, data and job file into a folder; return the path of the job file."""
    import yaml

    from toolkit.trainer.sample import write_sample

    sample = write_sample(out)
    gpu, count = _hardware(cpu, processes)
    job = {
        "model": {"name": str(sample.model), "init": "random"},
        "cluster": {"gpu": gpu, "gpus_per_node": count},
        "train": {
            "sequence_length": 128,
            "train_batch_size": 8 * count,
            "per_device_train_batch_size": 4,
            "learning_rate": 3e-3,
            "max_steps": STEPS,
            "warmup_steps": 5,
            "save_steps": 20,
            "eval_steps": 20,
            "output_dir": str(out / "run"),
        },
        "data": {"train": str(sample.data), "validation_fraction": 0.05},
        "parallel": {"zero_stage": zero_stage},
    }
    path = out / "job.yaml"
    header = f"# Run with: toolkit train {path}\n"
    path.write_text(header + yaml.safe_dump(job, sort_keys=False), encoding="utf-8")
    return path


def _hardware(cpu: bool, processes: int) -> tuple[str, int]:
    """Return the catalogue name and number of the cards here, at most `processes`, or CPU processes."""
    from toolkit.launch.devices import local_gpus

    found = [] if cpu else local_gpus()
    if not found:
        return "cpu", processes
    return found[0], min(processes, found.count(found[0]))


def _claim(out: Path, *, overwrite: bool) -> None:
    from toolkit.launch.output_lock import use_problems

    raise_all(RunError, use_problems(out / "run"))
    if out.exists() and any(out.iterdir()):
        ours = (out / MARKER).exists()
        if not (overwrite and ours):
            raise PlanError.of(
                code="OUTPUT_EXISTS",
                key="--out",
                message=f"{out} is not empty",
                fix="Choose another --out" + (", or replace it with --overwrite" if ours else ""),
            )
        for name in WRITTEN:
            path = out / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    make_folder(out)
    (out / MARKER).touch()


def _finish(plan: Plan, job: Path, *, as_json: bool, began: float) -> None:
    import json

    from toolkit.checkpoint.discovery import latest_checkpoint
    from toolkit.cli.export import describe_scores, load_exporter
    from toolkit.trainer.checks import EXPORT_FOLDER

    last, folder = latest_checkpoint(plan.output_dir), plan.output_dir / EXPORT_FOLDER
    done = load_exporter()(last, folder, check_logits=True, verify_first=False)
    metrics = plan.output_dir / "metrics.jsonl"
    records = map(json.loads, metrics.read_text(encoding="utf-8").splitlines())
    losses = [record["loss"] for record in records if "loss" in record]
    seconds = time.perf_counter() - began
    assert done.logits_difference is not None, "check_logits=True compares, or raises"
    if as_json:
        print_json(
            {
                "job": str(job),
                "plan": str(plan.output_dir / "plan.json"),
                "metrics": str(metrics),
                "checkpoint": str(last),
                "export": str(done.folder),
                "first_loss": losses[0],
                "last_loss": losses[-1],
                "logits_difference": done.logits_difference,
                "seconds": seconds,
            }
        )
        return
    print_fields(
        [
            ("job file", str(job)),
            ("plan", str(plan.output_dir / "plan.json")),
            ("configs", str(plan.output_dir / "configs")),
            ("metrics", f"{metrics}: loss {losses[0]:.3f} to {losses[-1]:.3f} in {len(losses)} steps"),
            ("checkpoint", str(last)),
            ("export", f"{folder} ({format_bytes(done.report.num_bytes)})"),
            ("checked", describe_scores(done.logits_difference)),
            ("time", format_seconds(seconds)),
        ]
    )


def _say(number: int, text: str, as_json: bool) -> None:
    if not as_json:
        typer.secho(f"[{number}/5] {text}", bold=True)
