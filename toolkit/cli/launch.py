"""`toolkit launch`: runs a user's script under our supervisor, with a job or without one."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from toolkit.cli.on_hosts import HostfileOption, HostsOption, launch_on_hosts_without_job, read_hosts, run_and_exit
from toolkit.cli.options import JsonOption, SetOption, note_job, note_json, read_plan
from toolkit.cli.output import print_json, say
from toolkit.launch.environment import python_module

_LaunchedJob = Annotated[
    Path | None,
    typer.Argument(
        metavar="[JOB]",
        help="Job file, or a plan.json that `toolkit emit` wrote; left out with --num-proc.",
        show_default=False,
        callback=note_job,
    ),
]
_PYTHONS = ("python", "python3")
_IMPORTS_HOROVOD = re.compile(r"^\s*(?:import|from)\s+horovod\b", re.MULTILINE)
HOROVOD_MODULE = "toolkit.compat.horovod"
_DEFAULT_OUTPUT = Path("runs")


def register(app: typer.Typer) -> None:
    """Add the command."""
    # Everything after SCRIPT belongs to the script, options included.
    app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})(launch)


def launch(
    context: typer.Context,
    job: _LaunchedJob = None,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCRIPT [ARGS]...", help="Python script and its own arguments; `python` may stand before it."
        ),
    ] = None,
    overrides: SetOption = None,
    num_proc: Annotated[
        int | None,
        typer.Option(
            "--num-proc",
            "-np",
            min=1,
            help="Run SCRIPT without a JOB, in so many processes of this machine, or of all --hosts together.",
        ),
    ] = None,
    on_cpu: Annotated[
        bool, typer.Option("--cpu", help="With --num-proc: over gloo, and without the cards of this machine.")
    ] = False,
    output_dir: Annotated[
        Path | None,
        typer.Option(help="With --num-proc: folder of logs, by default runs/NAME for a script NAME.py."),
    ] = None,
    hosts: HostsOption = None,
    hostfile: HostfileOption = None,
    horovod: Annotated[
        bool, typer.Option("--horovod", help="SCRIPT imports horovod.torch: run it on torch.distributed.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Run your script as every rank of a job on this node, with the environment, logs and clean end of `toolkit train`.

    The script finds the plan by `tk.Plan.load(Path(os.environ["TOOLKIT_PLAN"]))`. Rank 0 has the terminal; the others
    write to output_dir/logs. Options of `launch` stand before SCRIPT. A script that has no job is started by --num-proc: one
    process for a card, or over gloo where there is none.

    Example: `toolkit launch job.yaml --set cluster.gpus_per_node=2 my_script.py --my-option 3`

    Example: `toolkit launch --num-proc 2 --horovod my_script.py --my-option 3`

    Example: `toolkit launch --hosts node1:4,node2:4 job.yaml my_script.py`

    Example: `toolkit launch -np 8 -H node1:4,node2:4 --horovod my_script.py`

    JSON keys, printed last: exit_code, interrupted, plan, log_dir, failure (rank, ended_by, log_file, problems).
    """
    from toolkit.cli.launching import print_failure

    words = list(command or ())
    _refuse_unknown_option(job)
    if num_proc is not None:
        words = [] if job is None else _without_python([str(job), *words])
        _refuse_job_options(overrides)
        note_job(context, None)
        as_json = note_json(context, as_json)
        if hosts is not None or hostfile is not None:
            script = _script(words)
            flags = [*(["--cpu"] if on_cpu else []), *(["--horovod"] if horovod else [])]
            flags += [] if output_dir is None else ["--output-dir", str(output_dir)]
            run = [*flags, str(script), *words[1:]]
            launch_on_hosts_without_job(num_proc, run, hosts, hostfile, as_json=as_json)
        outcome, shown = _launch_without_job(
            words, num_proc=num_proc, on_cpu=on_cpu, output_dir=output_dir, horovod=horovod
        )
    else:
        if job is None:
            raise typer.BadParameter("name a job file, or run a script without one by --num-proc N", param_hint="JOB")
        _refuse_options_without_job(job, on_cpu=on_cpu, output_dir=output_dir)
        more, words = _own_options(words)
        words = _without_python(words)
        as_json = note_json(context, as_json or "--json" in more)
        sets = [*(overrides or ()), *(option.removeprefix("--set=") for option in more if option.startswith("--set="))]
        horovod = horovod or "--horovod" in more
        if hosts is not None or hostfile is not None:
            script = _script(words)
            found, plan, sizes = read_hosts(job, sets, hosts, hostfile, as_json=as_json)
            options = [
                *(word for override in sets for word in ("--set", override)),
                *(["--horovod"] if horovod else []),
            ]
            run_and_exit(found, plan, ["launch", *options, *sizes, str(job), str(script), *words[1:]], trainer=False)
        outcome, shown = _launch_job(job, words, overrides=sets, horovod=horovod)
    print_failure(outcome)
    if outcome.failure is not None and not horovod and _lacks_horovod(Path(words[0])):
        say(f"{words[0]} imports horovod, which is not installed: `toolkit launch --horovod` runs it without")
    if as_json:
        print_json(shown)
    raise typer.Exit(outcome.exit_code)


def _launch_job(job: Path, command: list[str], *, overrides: list[str], horovod: bool) -> tuple[Any, dict[str, Any]]:
    script = _script(command)
    from toolkit.cli.launching import become_rank, log_folder, outcome_as_dict, place_of, run_on_this_node
    from toolkit.launch.place import Node

    plan = read_plan(job, overrides)
    place = place_of(plan)
    if place is not None and not isinstance(place, Node):
        become_rank(plan, _worker(script, command[1:], horovod=horovod, log_dir=None), place)
    if place is not None:
        say(place.describe())
    worker = _worker(script, command[1:], horovod=horovod, log_dir=log_folder(plan))
    outcome = run_on_this_node(plan, worker, node=place)
    return outcome, outcome_as_dict(plan, outcome)


def _launch_without_job(
    command: list[str], *, num_proc: int, on_cpu: bool, output_dir: Path | None, horovod: bool
) -> tuple[Any, dict[str, Any]]:
    script = _script(command)
    from toolkit.cli.launching import outcome_as_dict, run_without_job
    from toolkit.launch.local import LOGS

    folder = output_dir or _DEFAULT_OUTPUT / script.stem
    worker = _worker(script, command[1:], horovod=horovod, log_dir=folder / LOGS)
    outcome = run_without_job(worker, num_ranks=num_proc, on_cpu=on_cpu, output_dir=folder)
    return outcome, outcome_as_dict(None, outcome, log_dir=folder / LOGS)


def _worker(script: Path, arguments: list[str], *, horovod: bool, log_dir: Path | None) -> list[str]:
    """Return the command line of a rank, whose error a supervisor looks for in `log_dir`."""
    if not horovod:
        return [sys.executable, str(script), *arguments]
    told = [] if log_dir is None else ["--log-dir", str(log_dir)]
    return [*python_module(HOROVOD_MODULE), *told, str(script), *arguments]


def _refuse_job_options(overrides: list[str] | None) -> None:
    if overrides:
        raise typer.BadParameter("--set changes a job, and --num-proc runs a script without one", param_hint="--set")


def _refuse_options_without_job(job: Path, *, on_cpu: bool, output_dir: Path | None) -> None:
    if job.suffix == ".py":
        what = f"{job} is a script: put a job file before it, or --num-proc N to run it without a job"
        raise typer.BadParameter(what, param_hint="JOB")
    for given, name, key in (
        (on_cpu, "--cpu", "cluster.gpu=cpu"),
        (output_dir, "--output-dir", "train.output_dir=DIR"),
    ):
        if given:
            what = f"{name} is for --num-proc, which runs a script without a job: use --set {key}"
            raise typer.BadParameter(what, param_hint=name)


def _own_options(command: list[str]) -> tuple[list[str], list[str]]:
    """Split off the options between JOB and SCRIPT, which the parser leaves to the script: `--set=…`, `--json`, `--horovod`."""
    own: list[str] = []
    rest = list(command)
    while rest and rest[0].startswith("-"):
        option = rest.pop(0)
        if option in ("--json", "--horovod") or option.startswith("--set="):
            own.append(option)
        elif option == "--set" and rest:
            own.append(f"--set={rest.pop(0)}")
        elif option == "--":
            break
        else:
            _refuse_elastic(option)
            raise typer.BadParameter(f"{option} is not an option of launch", param_hint="SCRIPT")
    return own, rest


def _refuse_unknown_option(job: Path | None) -> None:
    """Refuse an option that stands before JOB or SCRIPT and that the parser, which leaves those of a script alone, took for it."""
    if job is not None and str(job).startswith("-"):
        _refuse_elastic(str(job))
        what = f"{job} is not an option of launch; `toolkit launch --help` lists those, and your script's stand after SCRIPT"
        raise typer.BadParameter(what, param_hint="SCRIPT")


def _refuse_elastic(option: str) -> None:
    if option == "--elastic":
        what = (
            "launch starts a fixed number of processes once: start the script by `torchrun --nnodes MIN:MAX --max-restarts N`, or a job by "
            "`toolkit train JOB --elastic` under it"
        )
        raise typer.BadParameter(what, param_hint="--elastic")


def _without_python(command: list[str]) -> list[str]:
    """Return a command without the `python` before its script, as horovodrun's have it: each rank runs by the Python of this command."""
    if not command or command[0] not in _PYTHONS or Path(command[0]).is_file():
        return command
    if len(command) > 1 and command[1].startswith("-"):
        what = f"{command[1]} is an option of {command[0]}, of which none are passed on: name the script after {command[0]}"
        raise typer.BadParameter(what, param_hint="SCRIPT")
    return command[1:]


def _lacks_horovod(script: Path) -> bool:
    """Return whether a script imports Horovod where it is not installed."""
    if importlib.util.find_spec("horovod") is not None:
        return False
    return _IMPORTS_HOROVOD.search(script.read_text(encoding="utf-8", errors="replace")) is not None


def _script(command: list[str]) -> Path:
    if not command:
        raise typer.BadParameter("name the script to run", param_hint="SCRIPT")
    script = Path(command[0])
    if not script.is_file():
        raise typer.BadParameter(f"{script} is not a file", param_hint="SCRIPT")
    return script
