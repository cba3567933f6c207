"""`toolkit launch`: runs a user's script under our supervisor."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from toolkit.cli.options import JobArgument, JsonOption, SetOption, note_json, read_plan
from toolkit.cli.output import print_json


def register(app: typer.Typer) -> None:
    """Add the command."""
    # Everything after SCRIPT belongs to the script, options included.
    app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})(launch)


def launch(
    context: typer.Context,
    job: JobArgument,
    command: Annotated[
        list[str], typer.Argument(metavar="SCRIPT [ARGS]...", help="Python script and its own arguments.")
    ],
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run your script as every rank of a job on this node, with the environment, logs and clean end of `toolkit train`.

    The script finds the plan by `tk.Plan.load(Path(os.environ["TOOLKIT_PLAN"]))`. Rank 0 has the terminal; the others
    write to output_dir/logs. Options of `launch` stand before SCRIPT.

    Example: `toolkit launch job.yaml --set cluster.gpus_per_node=2 my_script.py --my-option 3`

    JSON keys, printed last: exit_code, interrupted, plan, log_dir, failure (rank, ended_by, log_file, problems).
    """
    more, more_json, command = _own_options(command)
    as_json = note_json(context, as_json or more_json)
    script = _script(command)
    from toolkit.cli.launching import outcome_as_dict, print_failure, run_on_this_node

    plan = read_plan(job, [*(overrides or ()), *more])
    outcome = run_on_this_node(plan, [sys.executable, str(script), *command[1:]])
    print_failure(outcome)
    if as_json:
        print_json(outcome_as_dict(plan, outcome))
    raise typer.Exit(outcome.exit_code)


def _own_options(command: list[str]) -> tuple[list[str], bool, list[str]]:
    """Extract the options between JOB and SCRIPT, which the parser leaves to the script."""
    overrides: list[str] = []
    as_json, rest = False, list(command)
    while rest and rest[0].startswith("-"):
        option = rest.pop(0)
        if option == "--json":
            as_json = True
        elif option == "--set" and rest:
            overrides.append(rest.pop(0))
        elif option.startswith("--set="):
            overrides.append(option.removeprefix("--set="))
        elif option == "--":
            break
        else:
            raise typer.BadParameter(f"{option} is not an option of launch", param_hint="SCRIPT")
    return overrides, as_json, rest


def _script(command: list[str]) -> Path:
    if not command:
        raise typer.BadParameter("name the script to run", param_hint="SCRIPT")
    script = Path(command[0])
    if not script.is_file():
        raise typer.BadParameter(f"{script} is not a file", param_hint="SCRIPT")
    return script
