"""The `toolkit` command: its subcommands, its errors and its exit codes.

Exit codes: 0 fine; 1 the job does not fit, or a check failed; 2 bad input; 3 the run or its export failed, or this machine cannot start it; 75 out of time; 130 interrupted.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from typing import Annotated, Any

import typer

from toolkit.cli.options import PYDANTIC_OFF, PYDANTIC_SWITCH, Interaction
from toolkit.cli.output import INTERRUPTED, discard_stdout, prepare_streams, print_problems, say
from toolkit.errors import INTERRUPTED_EXIT_CODE, RunError, SpecError, ToolkitError
from toolkit.launch.quiet import quiet_packages

# Modules of this package, in the order in which `toolkit --help` lists them: that of a job's stages.
COMMANDS = (
    "quickstart",
    "validate",
    "migrate",
    "data",
    "estimate",
    "plan",
    "emit",
    "train",
    "profile",
    "calibrate",
    "launch",
    "checkpoint",
    "export",
    "topology",
    "schedule",
    "doctor",
    "diagnose",
    "gpus",
    "models",
)


# Commands that start no run and end within seconds.
BRIEF = frozenset({"validate", "migrate", "estimate", "plan", "emit", "topology", "schedule", "gpus", "models"})

# Base class of typer's errors for a command line; typer exports no name for it, and the click it builds on varies.
_UsageError: type[Any] = typer.BadParameter.__bases__[0]


def build_app(commands: Sequence[str] = COMMANDS) -> typer.Typer:
    """Return the application with these commands; the module of each has `register(app)`."""
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

    for name in commands:
        import_module(f"toolkit.cli.{name}").register(app)
    return app


def _print_version(value: bool) -> None:
    if value:
        from toolkit import __version__

        print(__version__)
        raise typer.Exit


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; every error that the user can act on is printed, not raised."""
    interaction = Interaction()
    # Before it builds its first model, pydantic reads the metadata of every installed package in search of plugins: a
    # fifth of the start. None applies to our models. `launching` removes the variable for the processes of a run.
    os.environ.setdefault(PYDANTIC_SWITCH, PYDANTIC_OFF)
    prepare_streams()
    quiet_packages()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(arguments, interaction)
        sys.stdout.flush()
    except ToolkitError as error:
        _report(_with_lines(error, interaction), as_json=interaction.as_json)
        return error.exit_code
    except (KeyboardInterrupt, _InterruptedError):
        with contextlib.suppress(OSError):
            say(INTERRUPTED)
        return INTERRUPTED_EXIT_CODE
    except BrokenPipeError:
        discard_stdout()
        return 1
    except OSError as error:
        failure = _system_error(error)
        _report(failure, as_json=interaction.as_json)
        return failure.exit_code
    return code


def _run(arguments: list[str], interaction: Interaction) -> int:
    # The called command is enough; listing the commands, or suggesting one for a typing error, needs all.
    called = [name for name in COMMANDS if name in arguments[:1]]
    with _uncollected() if BRIEF.intersection(called) else contextlib.nullcontext():
        return _call(called, arguments, interaction)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Run a `with` block without searching for garbage, of which imports leave none; estimates switch it on again."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class _InterruptedError(BaseException):
    """Ctrl-C in a command that does not report it itself: typer would make the exit code of a KeyboardInterrupt, and say nothing."""


def _invoke(invoke: Callable[[Any], Any], context: Any) -> Any:
    try:
        return invoke(context)
    except KeyboardInterrupt:
        raise _InterruptedError from None


def _call(called: Sequence[str], arguments: list[str], interaction: Interaction) -> int:
    try:
        # Not standalone: its errors are then printed here, as JSON where that was asked for.
        command: Any = typer.main.get_command(build_app(called or COMMANDS))
        command.invoke = partial(_invoke, command.invoke)
        result = command.main(arguments, prog_name="toolkit", obj=interaction, standalone_mode=False)
    except _UsageError as error:
        if not error.format_message():  # a group without a command has printed its help
            return ToolkitError.exit_code
        # The parsing itself may have failed before it reached --json.
        interaction.as_json |= "--json" in arguments
        raise _usage_error(error, arguments) from None
    except typer.Abort:
        return INTERRUPTED_EXIT_CODE
    except SystemExit as stop:  # typer exits so when a pipe is closed
        return stop.code if isinstance(stop.code, int) else ToolkitError.exit_code
    return result if isinstance(result, int) else 0  # the code of typer.Exit


def _usage_error(error: Any, arguments: Sequence[str]) -> SpecError:
    """Turn typer's error about the command line into a problem, with the value that typer leaves out."""
    parameter = getattr(error, "param", None)
    names = [] if parameter is None else parameter.opts
    values = [given.partition("=")[2] for given in arguments if given.partition("=")[0] in names and "=" in given]
    values += [after for name, after in itertools.pairwise(arguments) if name in names]
    command = "toolkit" if error.ctx is None else error.ctx.command_path
    hint = getattr(error, "param_hint", None)
    key = names[0] if names else hint if isinstance(hint, str) else command
    message = error.message if error.message and (values or key == hint) else error.format_message()
    shown = f"{key}={values[-1]:.80}: " if values else "" if key in message else f"{key}: "
    return SpecError.of(
        code="USAGE",
        key=key,
        message=shown + " ".join(message.removeprefix("Value error, ").split()).rstrip(".?"),
        fix=f"`{command} --help` shows what it takes",
    )


def _report(error: ToolkitError, *, as_json: bool) -> None:
    """Print problems; if stdout is closed they go to stderr, and if that is closed too they are dropped."""
    try:
        print_problems(error.problems, as_json=as_json)
        sys.stdout.flush()
    except OSError:
        discard_stdout()
        with contextlib.suppress(OSError):
            print_problems(error.problems, as_json=False)


def _with_lines(error: ToolkitError, interaction: Interaction) -> ToolkitError:
    """Add the lines of the job file to the problems of its keys."""
    if interaction.job is None:
        return error
    from toolkit.cli.options import is_plan_file
    from toolkit.config.key_lines import with_lines

    try:
        if is_plan_file(interaction.job):
            return error
    except (ToolkitError, OSError):
        return error
    return type(error)(*with_lines(error.problems, interaction.job, interaction.overrides))


def _system_error(error: OSError) -> RunError:
    if error.filename is None and isinstance(error, FileNotFoundError):  # the error of os.getcwd
        return RunError.of(
            code="SYSTEM",
            key="working directory",
            message="the folder that this command was started in no longer exists",
            fix="Change to a folder that exists, and start again",
        )
    return RunError.of(
        code="SYSTEM",
        key=str(error.filename or ""),
        message=f"the system refused: {error.strerror or error}" + (f" ({error.filename})" if error.filename else ""),
        fix="Check that the path exists, that you may use it and that the disk has room",
    )
