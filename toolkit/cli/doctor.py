"""`toolkit doctor`: what of this machine keeps a job from running, or makes it slower."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.cli.options import JsonOption, OptionalJobArgument, SetOption, read_plan
from toolkit.cli.output import print_json, say
from toolkit.errors import RunError, ToolkitError

if TYPE_CHECKING:
    from toolkit.doctor.checkup import Checkup
    from toolkit.doctor.findings import Finding
    from toolkit.planning.plan import Plan
    from toolkit.topology.placement import Placement

_STYLES = {"error": "red", "warning": "yellow", "note": "cyan", "ok": "green"}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(doctor)


def doctor(
    job: OptionalJobArgument = None,
    overrides: SetOption = None,
    build: Annotated[
        bool,
        typer.Option("--build", help="Compile DeepSpeed's extensions now: minutes, which the first run then spares."),
    ] = False,
    distributed: Annotated[
        bool, typer.Option("--distributed", help="Test the process groups too, as `toolkit diagnose` does.")
    ] = False,
    seconds: Annotated[
        float,
        typer.Option(
            "--seconds",
            metavar="SECONDS",
            min=1.0,
            help="How long the probes may take together; builds and groups are not among them.",
        ),
    ] = 10.0,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", metavar="DIR", help="Folder of checkpoints whose disk is measured; a job has its own."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Look at this machine in ten seconds: what keeps a job from running, what makes it slower, and the repair of each.

    Versions and whether they fit, compilers, the cards and who has taken their memory, links and measured speeds, RAM and limits, disks,
    names and ports, and each environment variable that changes behaviour or has a value that nothing can use. With a job, whether this machine can run it. Works without a
    GPU. Each probe ends in time: what hangs is a finding. Exits with 1 if a job could not run.

    Example: `toolkit doctor`, `toolkit doctor job.yaml --distributed`, `toolkit doctor --build`

    JSON keys: findings (code, level: error, warning, note or ok, subject, seen, why, repair, source), can_run, seconds, and with
    --distributed groups, the object of `toolkit diagnose --json`, or null where variables of a launcher do not fit together.
    """
    from toolkit.doctor.checkup import Checkup, examine
    from toolkit.doctor.job import problem_findings
    from toolkit.doctor.variables import launch_finding
    from toolkit.launch.identity import rank_from_environment

    plan: Plan | None = None
    refused: list[Finding] = []
    if job is not None:
        try:
            plan = read_plan(job, overrides)
        except ToolkitError as error:
            refused = problem_findings(error, str(job))
    elif overrides:
        raise typer.BadParameter("it changes a job: name its file", param_hint="--set")
    identity, asked_groups = None, distributed
    try:
        identity = rank_from_environment(os.environ)
    except RunError as error:
        refused.append(launch_finding(error, os.environ))
        distributed = False  # its ranks could not start
    if identity is not None and identity.local_rank:
        made = Checkup(findings=(), seconds=0.0)  # the node's first rank looks at it
    else:
        made = examine(plan=plan, path=str(job or ""), output=output, seconds=seconds, build=build)
    made = Checkup(findings=(*refused, *made.findings), seconds=made.seconds)
    is_first = identity is None or identity.rank == 0
    if not is_first:
        _show_faults(made)
    elif not as_json:
        _show(made, job)
    groups: dict[str, Any] | None = None
    code = 0
    if distributed:
        placement = _placement(plan)
        groups, code = _test_groups(placement, plan, as_json=as_json)
        skew = _skew_finding(groups, placement)
        if skew is not None:
            made = Checkup(findings=(*made.findings, skew), seconds=made.seconds)
            if not as_json:
                _show_one(skew)
    if as_json and is_first:
        found = {"findings": [finding.as_dict() for finding in made.findings], "can_run": made.can_run}
        print_json({**found, "seconds": round(made.seconds, 2), **({"groups": groups} if asked_groups else {})})
    raise typer.Exit(code or (0 if made.can_run else 1))


def _placement(plan: Plan | None) -> Placement:
    """Return the ranks of a job, those of a launcher, or one for each card here, two on a machine without."""
    from toolkit.cli.sizes import Sizes, read_placement, with_launched_sizes
    from toolkit.launch.devices import visible_cards
    from toolkit.topology.placement import place_job

    if plan is not None:
        return place_job(plan.job)
    sizes = with_launched_sizes(Sizes(pp=None, dp=None, tp=None, nodes=None, gpus_per_node=None))
    if sizes.gpus_per_node is None:
        sizes = replace(sizes, gpus_per_node=len(visible_cards() or ()) or 2)
    return read_placement(None, None, sizes)[1]


def _test_groups(placement: Placement, plan: Plan | None, *, as_json: bool) -> tuple[dict[str, Any] | None, int]:
    """Test every group of a placement; return the result, which is printed unless it is to be JSON, and the exit code."""
    from toolkit.cli.diagnose import DEFAULT_TIMEOUT, check_placement, show

    results: list[dict[str, Any]] = []

    def deliver(placement: Placement, result: dict[str, Any]) -> None:
        results.append(result)
        if not as_json:
            show(placement, result, as_json=False)

    gpu = None if plan is None else plan.job.cluster.gpu
    code = check_placement(placement, gpu=gpu, timeout_seconds=DEFAULT_TIMEOUT, as_json=False, deliver=deliver)
    return (results[0] if results else None), code


def _skew_finding(groups: dict[str, Any] | None, placement: Placement) -> Finding | None:
    from toolkit.doctor.network import skew_finding

    skew = None if groups is None else groups["clock_skew_seconds"]
    return None if skew is None or placement.num_nodes < 2 else skew_finding(skew, placement.num_nodes)


def _show_faults(made: Checkup) -> None:
    """Print what is wrong with another node than the first, a line each, with its name."""
    for finding in made.findings:
        if finding.level in ("error", "warning"):
            say(f"{socket.gethostname()}: {finding.level}: {finding.seen}. {finding.repair} [{finding.code}]")


def _show_one(finding: Finding) -> None:
    mark = typer.style(f"{finding.level:<7}", fg=_STYLES[finding.level], bold=finding.level == "error")
    typer.echo(f"{mark} {finding.seen}{'' if finding.level == 'ok' else f'  [{finding.code}]'}")
    if finding.level != "ok":
        print(f"        {finding.why}")
        print(f"        repair: {finding.repair}")


def _show(made: Checkup, job: Path | None) -> None:
    """Print the findings: what is wrong with its repair, then what is fine."""
    for finding in made.findings:
        _show_one(finding)
    counts = {level: sum(each.level == level for each in made.findings) for level in ("error", "warning", "note")}
    told = ", ".join(f"{count} {level}{'s' if count > 1 else ''}" for level, count in counts.items() if count)
    what = "this job" if job is not None else "jobs"
    verdict = "can run here" if made.can_run else "cannot run here before the errors are repaired"
    print(f"\n{told or 'nothing is wrong'}, found in {made.seconds:.1f} s: {what} {verdict}")
