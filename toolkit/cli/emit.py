"""`toolkit emit`: a plan as files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from toolkit.artifacts.launchers.catalogue import LAUNCHERS
from toolkit.cli.options import JobArgument, JsonOption, SetOption
from toolkit.cli.output import print_json, warn

if TYPE_CHECKING:
    from toolkit.artifacts.files import Emitted
    from toolkit.artifacts.launchers.catalogue import LauncherName


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(emit)


def _folder(written: str) -> Path:
    """Read --out by the rules of a job's paths: a shell leaves the ~ of --out=~/x as it is."""
    from pydantic import TypeAdapter, ValidationError

    from toolkit.config.fields import Folder

    try:
        return TypeAdapter(Folder).validate_python(written)
    except ValidationError as error:
        raise typer.BadParameter(error.errors()[0]["msg"].removeprefix("Value error, ")) from None


def _launcher(name: str) -> str:
    if name not in LAUNCHERS:
        raise typer.BadParameter(f"no such launcher; name one of {', '.join(LAUNCHERS)}")
    return name


def emit(
    job: JobArgument,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", parser=_folder, help="Folder to write; made if absent.")],
    hosts: Annotated[
        str | None,
        typer.Option(
            metavar="A,B", help="Names of the nodes, first that of rank 0: adds a hostfile for DeepSpeed's launcher."
        ),
    ] = None,
    launcher: Annotated[
        list[str] | None,
        typer.Option(
            "--launcher",
            metavar="NAME",
            parser=_launcher,
            help=f"Adds the files with which NAME starts the job: {', '.join(LAUNCHERS)}. Repeatable; docs/launch.md explains each.",
        ),
    ] = None,
    image: Annotated[
        str | None,
        typer.Option(
            metavar="IMAGE", help="Container image that has toolkit in it; launchers that run containers need it."
        ),
    ] = None,
    container: Annotated[
        Literal["pyxis", "apptainer"] | None,
        typer.Option(help="What runs the image under SLURM. Default: pyxis.", show_default=False),
    ] = None,
    time_limit: Annotated[
        str | None,
        typer.Option(
            metavar="[D-]HH:MM:SS",
            help="Longest time of the run: slurm, pytorchjob, jobset, azureml, sagemaker, modal.",
        ),
    ] = None,
    partition: Annotated[str | None, typer.Option(metavar="NAME", help="SLURM's partition.")] = None,
    account: Annotated[str | None, typer.Option(metavar="NAME", help="SLURM's account.")] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Another option of sbatch: --sbatch constraint=h100. Repeatable."),
    ] = None,
    cpus: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="CPU cores of each node to ask for: slurm (8 for each card if left out), pytorchjob, jobset, skypilot, modal.",
        ),
    ] = None,
    volume: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Where the run keeps its files: a volume claim (pytorchjob, jobset), a volume (modal, skypilot) or a network "
            "volume (runpod).",
        ),
    ] = None,
    namespace: Annotated[
        str | None, typer.Option(metavar="NAME", help="Kubernetes namespace: pytorchjob, jobset.")
    ] = None,
    compute: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Compute cluster (azureml) or instance type (sagemaker), which both need."),
    ] = None,
    setup: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="Shell command that installs toolkit where the image lacks it: skypilot, vastai, runpod, modal.",
        ),
    ] = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write every config and launch command of a job, and where each value came from.

    Example: `toolkit emit job.yaml --out out`, then `bash out/commands.sh`.

    With `--launcher slurm`, `--launcher jobset` and the like also the files that start it there.

    Files of an earlier emit are rewritten or removed, and named; files of yours are never touched.

    Says what `toolkit validate` says. Where `toolkit train` would refuse the job, as for want of weights, commands.sh starts
    scripts of your own alone.

    JSON keys: folder, files (path, state: new, unchanged, rewritten, edited), removed, left_out (file, problems),
    untrainable (problems for which `toolkit train` would refuse the job), warnings.
    """
    from toolkit.artifacts.files import write_files
    from toolkit.artifacts.launchers.options import LaunchOptions
    from toolkit.cli.best_effort import check_or_exit
    from toolkit.planning.refusals import refusals

    options = LaunchOptions(
        image=image,
        container=container,
        time_limit=time_limit,
        partition=partition,
        account=account,
        sbatch=tuple(sbatch or ()),
        cpus=cpus,
        volume=volume,
        namespace=namespace,
        compute=compute,
        setup=setup,
    )
    verdict = check_or_exit(job, overrides, as_json=as_json)
    assert verdict.plan is not None
    result = write_files(
        verdict.plan,
        out,
        hosts=None if hosts is None else [host.strip() for host in hosts.split(",")],
        launchers=cast("list[LauncherName]", list(dict.fromkeys(launcher or ()))),
        options=options,
    )
    if as_json:
        print_json(_as_dict(result) | {"warnings": list(verdict.warnings)})
        return
    for name, state in result.states.items():
        print(f"{state:<10} {result.folder / name}")
    edited = [name for name, state in result.states.items() if state == "edited"]
    own = ["for that reason commands.sh only starts your own scripts"] if result.untrainable else []
    warn(
        [*verdict.warnings, *own]
        + [f"{name} had been edited by hand and was overwritten; make such changes in the job" for name in edited]
        + [f"no {', '.join(names)}: {reason}" for names, reason in refusals(result.left_out)]
    )


def _as_dict(result: Emitted) -> dict[str, Any]:
    return {
        "folder": str(result.folder),
        "files": [
            {"path": str(result.folder / name), "state": state}
            for name, state in result.states.items()
            if state != "removed"
        ],
        "removed": [str(result.folder / name) for name, state in result.states.items() if state == "removed"],
        "left_out": [
            {"file": name, "problems": [problem.as_dict() for problem in problems]}
            for name, problems in result.left_out.items()
        ],
        "untrainable": [problem.as_dict() for problem in result.untrainable],
    }
