"""`toolkit estimate`: what a job needs of each card, of the host and of the disk, before a GPU is rented."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from toolkit.cli.estimate_session import EstimateSession
from toolkit.cli.options import JobArgument, JsonOption, SetOption, collect, is_plan_file, read_job
from toolkit.cli.output import print_json
from toolkit.errors import Problem, SpecError, raise_all

if TYPE_CHECKING:
    from toolkit.catalog.gpus import Gpu
    from toolkit.config.job import Dtype, Job
    from toolkit.cost import StepTime
    from toolkit.memory.deepspeed_file import DeepSpeedFile
    from toolkit.memory.report.report import MemoryReport
    from toolkit.memory.scenario import Scenario
    from toolkit.memory.search.compare import Strategy
    from toolkit.memory.search.estimator import Estimator
    from toolkit.memory.search.sweep import Axis
    from toolkit.planning.plan import Plan

DeepSpeedOption = Annotated[
    Path | None,
    typer.Option(
        "--deepspeed-config",
        metavar="FILE",
        help='Your own DeepSpeed JSON, or Accelerate YAML, instead of ours; "auto" is filled in as by Trainer.',
        show_default=False,
    ),
]
WithoutZeroInitOption = Annotated[
    bool,
    typer.Option(
        "--without-zero-init",
        help="The stage-3 model is not built under zero.Init: each rank of your script calls from_pretrained.",
    ),
]
NoZeroInitOption = Annotated[bool, typer.Option("--no-zero-init", hidden=True, help="Older spelling of the same.")]
LoadDtypeOption = Annotated[
    Literal["bf16", "fp16", "fp32"] | None,
    typer.Option(
        "--load-dtype",
        metavar="bf16|fp16|fp32",
        help="With --without-zero-init: the dtype= of that call; the dtype of the files when left out.",
        show_default=False,
    ),
]
PlotOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Draw the phases, or the sweep: .png, .svg or .html.", show_default=False),
]
SweepOption = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=V1,V2", help="Estimate each value of a key of train or parallel. Repeatable."),
]
CompareOption = Annotated[
    str | None,
    typer.Option(metavar="NAMES", help="Strategies side by side: zero2,zero3-offload,pp2, …", show_default=False),
]
PackagesOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAMES|none",
        help="Packages of the machine that trains, in place of those here: mamba-ssm, causal-conv1d, flash-linear-attention, "
        "transformers==5.17.0.",
        show_default=False,
    ),
]
GpusOption = Annotated[
    str | None,
    typer.Option(metavar="all|NAMES", help="For each card, the fewest with which the job fits.", show_default=False),
]
CacheOption = Annotated[
    bool,
    typer.Option(
        " /--no-cache",
        help="Neither read nor keep results of earlier estimates (in the user's cache folder; TOOLKIT_NO_CACHE=1 does the same).",
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(estimate)


def estimate(
    job: JobArgument,
    overrides: SetOption = None,
    deepspeed_config: DeepSpeedOption = None,
    without_zero_init: WithoutZeroInitOption = False,
    no_zero_init: NoZeroInitOption = False,
    load_dtype: LoadDtypeOption = None,
    plot: PlotOption = None,
    sweep: SweepOption = None,
    compare: CompareOption = None,
    gpus: GpusOption = None,
    assume_packages: PackagesOption = None,
    cached: CacheOption = True,
    as_json: JsonOption = False,
) -> None:
    """Say what a job takes: memory of each card by phase and cause, of the host, of the disk, and what would save most.

    The real model is traced on fake tensors: no GPU, no weights. Exits with 1 where the job does not fit; with --sweep,
    --compare or --gpus where no row of the table does. Tight: it fits with less than 5 % of the card left.

    Example: `toolkit estimate job.yaml`, `toolkit estimate job.yaml --sweep sequence_length=2048,4096 --plot sweep.png`

    JSON keys: fits, fits_gpu, fits_host, tight, peak_allocated_bytes, allocator, allocator_slack_bytes,
    context_and_nccl_bytes, required_bytes, gpu_capacity_bytes, host_bytes_per_node, host_bytes_per_rank,
    host_capacity_bytes, condition and guess (what a verdict depends on, or why there is none), checkpoint_bytes, disk (checkpoint_bytes, num_checkpoints, export_bytes, total_bytes),
    worst_routing_peak_bytes (null without experts), limiting_phase,
    limiting_rank, num_traced_layers, num_layers, assumptions, ranks (rank, coordinate, required_bytes, phases:
    allocated_bytes, causes), savings (change, set, note, required_bytes, saved_bytes, host_bytes_added, fits, tight). With --sweep: fits,
    keys, rows; with --compare: fits, strategies (name, and full_name with the job's axes); with --gpus: fits, gpus; each row has its figures.
    """
    _check_options(plot=plot, sweep=sweep, compare=compare, gpus=gpus, deepspeed_config=deepspeed_config)
    with EstimateSession(as_json=as_json, cached=cached) as session:
        overrides = [*(overrides or []), *assumed_packages(assume_packages)]
        asked = _read_questions(job, overrides, deepspeed_config, plot=plot, sweep=sweep, compare=compare, gpus=gpus)
        case = _read_case(job, asked, zero_init=not (without_zero_init or no_zero_init), load_dtype=load_dtype)
        if asked.axes:
            from toolkit.cli.estimate_tables import answer_sweep

            fits = answer_sweep(case, asked.axes, plot=plot, session=session)
        elif asked.strategies:
            from toolkit.cli.estimate_tables import answer_compare

            fits = answer_compare(case, asked.strategies, session=session)
        elif asked.gpus:
            from toolkit.cli.estimate_tables import answer_gpus

            fits = answer_gpus(case, asked.gpus, session=session)
        else:
            fits = _answer(case, plot=plot, session=session)
    if not fits:
        raise typer.Exit(1)


def assumed_packages(packages: str | None) -> list[str]:
    """Return the values of the job that an assumption about the cluster's software sets."""
    if packages is None:
        return []
    names = [name.strip() for name in packages.split(",") if name.strip() not in ("", "none")]
    versions = [name.removeprefix("transformers==") for name in names if name.startswith("transformers==")]
    kernels = [name for name in names if not name.startswith("transformers==")]
    said = [f"cluster.transformers={version}" for version in versions]
    return said if versions and not kernels else [f"cluster.kernel_packages=[{','.join(kernels)}]", *said]


def _check_options(
    *, plot: Path | None, sweep: list[str] | None, compare: str | None, gpus: str | None, deepspeed_config: Path | None
) -> None:
    modes = {"--sweep": bool(sweep), "--compare": compare is not None, "--gpus": gpus is not None}
    chosen = [name for name, given in modes.items() if given]
    if len(chosen) > 1:
        raise typer.BadParameter(f"{' and '.join(chosen)} are mutually exclusive", param_hint=chosen[1])
    if plot is not None and chosen and chosen != ["--sweep"]:
        raise typer.BadParameter(f"nothing is drawn for {chosen[0]}", param_hint="--plot")
    if plot is not None and sweep and len(sweep) > 2:
        raise typer.BadParameter("it can draw one or two swept keys", param_hint="--plot")
    if deepspeed_config is not None and compare is not None:
        raise typer.BadParameter("it compares our configurations: leave --deepspeed-config out", param_hint="--compare")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """All options that the user gave, read without the hub."""

    job: Job
    file: DeepSpeedFile | None
    axes: tuple[Axis, ...] = ()
    strategies: tuple[Strategy, ...] = ()
    gpus: tuple[Gpu, ...] = ()


def _read_questions(
    path: Path,
    overrides: list[str],
    deepspeed_config: Path | None,
    *,
    plot: Path | None,
    sweep: list[str] | None,
    compare: str | None,
    gpus: str | None,
) -> _Asked:
    """Read job, card, DeepSpeed file and options; report all their errors at once, before the hub is asked for the model.

    Raises:
        SpecError: With all problems.
    """
    from toolkit.cli.best_effort import card_problems

    problems: list[Problem] = []
    job = collect(problems, lambda: read_job(path, overrides))
    problems += card_problems(path, overrides)
    file, axes, strategies, cards = None, None, None, None
    if deepspeed_config is not None:
        from toolkit.memory.deepspeed_file import DeepSpeedFile

        file = collect(problems, lambda: DeepSpeedFile.read(deepspeed_config))
    if sweep:
        from toolkit.memory.search.sweep import read_axes

        axes = collect(problems, lambda: read_axes(sweep))
    if compare is not None:
        from toolkit.memory.search.compare import read_strategies

        strategies = collect(problems, lambda: read_strategies(compare))
    if gpus is not None:
        from toolkit.memory.search.choose_gpu import read_gpus

        cards = collect(problems, lambda: read_gpus(gpus))
    if plot is not None:
        from toolkit.memory.report.figures import check_plot_path

        collect(problems, lambda: check_plot_path(plot))
    raise_all(SpecError, dict.fromkeys(problems))
    assert job is not None
    return _Asked(job=job, file=file, axes=axes or (), strategies=strategies or (), gpus=cards or ())


def _read_case(path: Path, asked: _Asked, *, zero_init: bool, load_dtype: Dtype | None) -> Scenario:
    """Find the model and resolve the job once, so that every error of it is reported before torch is imported."""
    from toolkit.memory.scenario import Scenario, check_zero_init

    written = asked.job
    if is_plan_file(path):
        from toolkit.planning.plan import Plan

        plan = Plan.load(path)
        model = plan.model if written.model == plan.job.model else None
        case = Scenario.of(written, model=model, gpu=plan.gpu, file=asked.file)
    else:
        case = Scenario.of(written, file=asked.file)
    case = replace(case, zero_init=zero_init, load_dtype=load_dtype)
    check_zero_init(case.plan(), zero_init=zero_init, load_dtype=load_dtype)
    return case


def _step_time(estimator: Estimator, plan: Plan, case: Scenario, report: MemoryReport) -> StepTime:
    """Return the time of a step, which is kept beside the report and depends on the card's speeds as well."""
    from toolkit.catalog.speed import speed_of
    from toolkit.cost import StepTime, step_time
    from toolkit.cost.learned import learned_speed
    from toolkit.memory.search.stored import is_cut_short

    key = None if is_cut_short(report.assumptions) else estimator.key_of(plan, case)
    if key is not None:
        key = f"{key} step time {speed_of(plan.gpu)!r} {learned_speed(plan.gpu)!r}"
    known = estimator.stored.get(key, StepTime)
    if known is not None:
        return known
    traces, settings = estimator.step_of(plan, case)
    made = step_time(plan, traces, settings=settings)
    estimator.stored.keep(key, made)
    return made


def _answer(case: Scenario, *, plot: Path | None, session: EstimateSession) -> bool:
    """Estimate a job; print the estimate as soon as it is known, then the list of savings, which takes longer."""
    from toolkit.cli.estimate_report import device_word, print_assumptions, print_report, print_savings

    plan = case.plan()
    with session.estimating() as estimator:
        report = estimator.estimate_plan(plan, case)
        time = None if plan.on_cpu else _step_time(estimator, plan, case, report)
    if not session.as_json:
        print_report(case, plan, report, time)
        sys.stdout.flush()
    with session.estimating():
        from toolkit.memory.search.advice import find_savings

        savings = find_savings(estimator, case, plan=plan, report=report)
        if plot is not None:
            from toolkit.memory.report.figures import plot_report

            plot_report(report, plot, title=f"{plan.model.name} on {plan.job.cluster.num_ranks} × {plan.gpu.name}")
    if session.as_json:
        found = {"step_time": None if time is None else time.to_dict()}
        print_json({**report.to_dict(), **found, "savings": [saving.to_dict() for saving in savings]})
        return report.fits
    print_savings(savings, device=device_word(plan))
    print_assumptions(case, plan, report, time)
    if plot is not None:
        print(f"drawn to {plot}")
    return report.fits
