"""The verdict on a user's files: each by itself, then together as they will run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from toolkit.deepspeed_spec.json_text import parse_object
from toolkit.errors import SpecError
from toolkit.user_files.check_accelerate import check_accelerate
from toolkit.user_files.check_arguments import check_arguments, read_values
from toolkit.user_files.check_deepspeed import batch_sizes, check_engine
from toolkit.user_files.check_fsdp import check_fsdp
from toolkit.user_files.check_launch import check_command, check_lines, check_quotes, check_sbatch
from toolkit.user_files.check_together import check_together, num_machines, num_ranks
from toolkit.user_files.engine_view import EngineView, view_of_file, view_of_section
from toolkit.user_files.read import UserFile
from toolkit.user_files.report import Found, Report, ordered
from toolkit.user_files.setup import Setup, assemble, gather


def check_files(sources: Iterable[str | Path]) -> Report:
    """Check files of other tools, and quoted command lines, as they will run together.

    Files that a file or a command names are read too. Nothing is raised: what cannot be read is a finding.
    """
    named = list(sources)
    files, errors = gather(named)
    unread = [
        Found.of_problem(problem, file=name, level="error") for name, error in errors for problem in error.problems
    ]
    report = check_read(files)
    return Report(files=report.files, found=ordered([*unread, *report.found], files), facts=report.facts)


def check_read(files: Sequence[UserFile]) -> Report:
    """Check files that have been read."""
    setup = assemble(files)
    found = [each for file in files for each in _alone(file, setup)]
    found += check_arguments(setup)
    for view in engine_views(setup):
        values = read_values(setup) if setup.uses_trainer and view.reader == "trainer" else None
        found += check_engine(view, values)
    found += check_together(setup)
    return Report(files=tuple(files), found=ordered(found, files), facts=tuple(_facts(setup)))


def engine_views(setup: Setup) -> Iterator[EngineView]:
    """Yield the DeepSpeed configurations of a run: its files, and the one that Accelerate makes of its section."""
    ranks = num_ranks(setup)
    count = None if ranks is None else ranks.value
    for file in setup.files:
        if file.kind == "deepspeed":
            yield view_of_file(file, setup, num_ranks=count)
        elif file.kind == "accelerate":
            precision = _precision_of(setup) if setup.accelerate is file else None
            if (view := view_of_section(file, setup, num_ranks=count, precision=precision)) is not None:
                yield view


def _precision_of(setup: Setup) -> str | None:
    """Return the precision that Trainer's arguments switch on; None if they switch on none, or are not known."""
    values = read_values(setup) if setup.uses_trainer else {}
    return next((name for name in ("fp16", "bf16") if values.get(name)), None)


def _alone(file: UserFile, setup: Setup) -> Iterator[Found]:
    if file.kind == "accelerate":
        yield from check_accelerate(file, setup)
        yield from check_fsdp(file, setup)
    elif file.kind in ("hostfile", "deepspeed-env"):
        yield from check_lines(file)
    elif file.kind == "sbatch":
        yield from check_sbatch(file)
    elif file.kind == "trainer-arguments":
        for key, line in file.ignored:
            yield Found(
                level="warning",
                code="KEY_TWICE",
                file=file.name,
                line=line,
                key=key,
                message=f"{key} appears twice; the last one counts",
                fix="Keep one",
                source="PyYAML SafeLoader",
            )
    if file.kind in ("command-line", "sbatch"):
        yield from check_quotes(file)
    for command in file.commands:
        yield from check_command(file, command)
        for option in command.arguments:
            # A DeepSpeed configuration may stand on the command line itself.
            if option.name == "deepspeed" and option.value and option.value.startswith("{"):
                yield from _inline(file, option.value, option.line)


def _inline(file: UserFile, text: str, line: int) -> Iterator[Found]:
    try:
        keys = parse_object(text, name="--deepspeed")
    except SpecError as error:
        for problem in error.problems:
            yield Found.of_problem(problem, file=file.name)
        return
    inner = UserFile(
        name=file.name, path=None, kind="deepspeed", text=text, keys=keys, lines={(key,): line for key in keys}
    )
    yield from check_engine(EngineView(file=inner, config=keys, reader="trainer", key_of=lambda path: path), None)


def _facts(setup: Setup) -> Iterator[str]:
    ranks, machines = num_ranks(setup), num_machines(setup)
    if ranks is not None:
        several = f" on {machines.value} machines" if machines is not None and machines.value > 1 else ""
        yield f"{ranks.value} rank{'' if ranks.value == 1 else 's'}{several} ({ranks.file}: {ranks.key})"
    for view in engine_views(setup):
        values = read_values(setup) if setup.uses_trainer and view.reader == "trainer" else None
        train, micro, steps = batch_sizes(view, values)
        if train and micro and steps and not train % (micro * steps):
            needed = train // (micro * steps)
            yield f"{view.file.name}: {train} = {micro} micro × {steps} accumulation × {needed} rank{'' if needed == 1 else 's'}"
        elif micro and steps and view.num_ranks:
            yield f"{view.file.name}: {micro * steps * view.num_ranks} = {micro} micro × {steps} accumulation × {view.num_ranks} ranks"
