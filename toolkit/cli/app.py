"""The `toolkit` command: its subcommands, its errors and its exit codes.

Exit codes: 0 fine; 1 a check failed; 2 bad input; 3 the run itself failed; 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from toolkit.cli import checkpoint, emit, export, gpus, launch, models, quickstart, topology, train, validate
from toolkit.cli.options import PYDANTIC_OFF, PYDANTIC_SWITCH, Interaction
from toolkit.cli.output import print_problems
from toolkit.errors import RunError, ToolkitError
from toolkit.launch.outcome import INTERRUPTED_EXIT_CODE

# In the order in which `toolkit --help` lists them: that of a job's journey.
COMMANDS = (quickstart, validate, emit, train, launch, checkpoint, export, topology, gpus, models)


def build_app() -> typer.Typer:
    """Gives the application with every command registered; a command module has `register(app)`."""
    app = typer.Typer(
        name="toolkit",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def root(
        version: Annotated[
            bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
        ] = False,
    ) -> None:
        """Plan, launch and train Hugging Face fine-tuning on the DeepSpeed engine, from one job file."""

    for module in COMMANDS:
        module.register(app)
    return app


def _print_version(value: bool) -> None:
    if value:
        from toolkit import __version__

        print(__version__)
        raise typer.Exit


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and gives its exit code; every error a person can act on is printed, not raised."""
    interaction = Interaction()
    # Before it builds its first model, pydantic reads the metadata of every installed package in search of plugins: a
    # fifth of the start. None has business with our models. `local_run` keeps it from the processes of a run.
    os.environ.setdefault(PYDANTIC_SWITCH, PYDANTIC_OFF)
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            typer.main.get_command(build_app()).main(arguments, prog_name="toolkit", obj=interaction)
        except SystemExit as stop:
            code = _exit_code(stop)
        else:
            code = 0
        sys.stdout.flush()
    except ToolkitError as error:
        print_problems(error.problems, as_json=interaction.as_json)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT_CODE
    except BrokenPipeError:
        # The reader of our output has left; without this the interpreter would complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _report_system(error, as_json=interaction.as_json)
    return code


def _exit_code(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    return stop.code if isinstance(stop.code, int) else 2


def _report_system(error: OSError, *, as_json: bool) -> int:
    failure = RunError.of(
        code="SYSTEM",
        key=str(error.filename or ""),
        message=f"the system refused: {error.strerror or error}" + (f" ({error.filename})" if error.filename else ""),
        fix="Check that the path exists, that you may use it and that the disk has room",
    )
    print_problems(failure.problems, as_json=as_json)
    return failure.exit_code
