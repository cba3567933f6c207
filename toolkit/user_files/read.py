"""The files of a user, or a quoted command line, read into keys with their lines."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.config.yaml_text import read_named
from toolkit.credentials import is_credential, masked_text
from toolkit.errors import Problem, SpecError
from toolkit.user_files import positions
from toolkit.user_files.commands import Command, launch_commands
from toolkit.user_files.directives import Directives, read_directives
from toolkit.user_files.kinds import KIND_WORDS, Kind, is_command_text, kind_of_mapping, kind_of_text, other_tool
from toolkit.user_files.positions import dotted, line_of
from toolkit.user_files.shell_variables import Word

# Name in messages of a command line that was given as a text.
TEXT_NAME = "command line"

# Variables that SLURM sets in the script from directives, where these are plain numbers.
_SLURM_VARIABLES = {
    "SLURM_NNODES": "nodes",
    "SLURM_JOB_NUM_NODES": "nodes",
    "SLURM_NTASKS": "ntasks",
    "SLURM_NTASKS_PER_NODE": "ntasks-per-node",
    "SLURM_GPUS_PER_NODE": "gpus-per-node",
    "SLURM_CPUS_PER_TASK": "cpus-per-task",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class UserFile:
    """A file of a kind that is known, as its own tool reads it.

    Args:
        name: Its path as the user wrote it, or "command line" for a text.
        path: Its path; None for a text.
        kind: Its kind.
        text: Its text.
        keys: Its content: nested keys of YAML and JSON; slots by host of a hostfile; values by name of `.deepspeed_env`;
            directives of an sbatch script by their long names. Empty for a command line.
        lines: Line of each key, by the parts of its path.
        commands: Commands of a script that start training.
        problems: Lines and options that its tool refuses, which are not among `keys`.
        ignored: Keys that its tool reads and drops: of a key that appears twice the first, directives below a command.
    """

    name: str
    path: Path | None
    kind: Kind
    text: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    lines: Mapping[tuple[str, ...], int] = field(default_factory=dict)
    commands: tuple[Command, ...] = ()
    problems: tuple[Problem, ...] = ()
    ignored: tuple[tuple[str, int], ...] = ()

    def line(self, key: str) -> int | None:
        """Return the line of a dotted key, or that of the nearest section around it."""
        return line_of(self.lines, key)


def read_file(source: str | Path) -> UserFile:
    """Read a file, or a command line given as a text.

    Raises:
        SpecError: FILE_NOT_FOUND, FILE_UNREADABLE; YAML_SYNTAX, YAML_NOT_MAPPING, DEEPSPEED_SYNTAX, DEEPSPEED_DUPLICATE for
            a file that its tool cannot read; FILE_KIND for one of no kind that is known.
    """
    name = str(source)
    if isinstance(source, str) and _is_command(source):
        return _script(source, name=TEXT_NAME, path=None, kind="command-line")
    path = Path(source)
    return read_text(read_named(path, kind="a configuration:"), name=name, path=path)


def read_text(text: str, *, name: str, path: Path | None = None) -> UserFile:
    """Read the text of a file.

    Raises:
        SpecError: As `read_file`.
    """
    if name.endswith(".json") or text.lstrip().startswith("{"):
        keys, lines = positions.read_json(text, name=name)
        kind = kind_of_mapping(keys) or "deepspeed"
        return UserFile(name=name, path=path, kind=_checked(kind, keys, name=name), text=text, keys=keys, lines=lines)
    kind_of = kind_of_text(text, name=name)
    if kind_of == "hostfile":
        return _hostfile(text, name=name, path=path)
    if kind_of == "deepspeed-env":
        return _variables(text, name=name, path=path)
    if kind_of is not None and not name.endswith((".yaml", ".yml")):
        return _script(text, name=name, path=path, kind=kind_of)
    keys, lines, twice = positions.read_yaml(text, name=name)
    found = _checked(kind_of_mapping(keys), keys, name=name)
    ignored = tuple((dotted(key), lines[key]) for key in twice)
    return UserFile(name=name, path=path, kind=found, text=text, keys=keys, lines=lines, ignored=ignored)


def _is_command(source: str) -> bool:
    """Return whether an argument is a command line rather than a path: it has blanks, starts training, and is no file."""
    if not re.search(r"\s", source.strip()) or not is_command_text(source):
        return False
    try:
        return not Path(source).exists()
    except (OSError, ValueError):
        return True


def _checked(kind: Kind | None, keys: Mapping[str, Any], *, name: str) -> Kind:
    tool = other_tool(keys) if kind in (None, "trainer-arguments", "job") else None
    if kind is None or tool is not None:
        what = f"is a configuration of {tool}, which reads it by its own rules" if tool else "has no key that is known"
        known = ", ".join(words for each, words in KIND_WORDS.items() if each != "job")
        raise SpecError.of(
            code="FILE_KIND",
            key=name,
            message=f"{name} {what}",
            fix=f"`toolkit migrate {name}` makes a job of it; or name one of these: {known}"
            if tool
            else f"Name one of these: {known}",
        )
    return kind


def _hostfile(text: str, *, name: str, path: Path | None) -> UserFile:
    """Read a hostfile line by line as deepspeed launcher/runner.py _parse_hostfile does."""
    slots: dict[str, int] = {}
    lines: dict[tuple[str, ...], int] = {}
    problems: list[Problem] = []
    for number, row in enumerate(text.splitlines(), start=1):
        written = row.strip()
        if not written or written.startswith("#"):
            continue
        found = re.search(r"^(\S+)\s+slots=(\d+)", written)
        if found is None:
            problems.append(
                _host_problem(name, number, written, "is not `NAME slots=NUMBER`", "Write such as `worker-0 slots=8`")
            )
        elif found.group(1) in slots:
            first = lines[(found.group(1),)]
            problems.append(
                _host_problem(
                    name, number, found.group(1), f"appears twice, first on line {first}", "Keep one of the two"
                )
            )
        else:
            slots[found.group(1)] = int(found.group(2))
            lines[(found.group(1),)] = number
    if not slots and not problems:
        problems.append(_host_problem(name, 1, name, "has no host", "Write a line `NAME slots=NUMBER` for each node"))
    return UserFile(name=name, path=path, kind="hostfile", text=text, keys=slots, lines=lines, problems=tuple(problems))


def _host_problem(name: str, line: int, key: str, message: str, fix: str) -> Problem:
    return Problem(
        code="HOSTFILE_LINE",
        key=key,
        message=f"{key} {message}: the launcher stops there",
        fix=fix,
        source="deepspeed launcher/runner.py _parse_hostfile",
        file=name,
        line=line,
    )


def _variables(text: str, *, name: str, path: Path | None) -> UserFile:
    """Read `.deepspeed_env` as deepspeed launcher/runner.py main does: every line is split at its first `=`.

    Blanks around the name and the value are taken off (launcher/multinode_runner.py add_export).
    """
    values: dict[str, str] = {}
    lines: dict[tuple[str, ...], int] = {}
    problems: list[Problem] = []
    for number, row in enumerate(text.splitlines(), start=1):
        key, equals, value = row.partition("=")
        if equals:
            values[key.strip()] = value.strip()
            lines[(key.strip(),)] = number
            continue
        written = _without_credential(row.strip())
        what = "an empty line" if not written else "a comment" if written.startswith("#") else f"`{written}`"
        problems.append(
            Problem(
                code="DEEPSPEED_ENV_LINE",
                key=written or name,
                message=f"{what} has no `=`, at which the launcher splits every line: it stops with a ValueError",
                fix="Remove the line; write only NAME=value",
                source="deepspeed launcher/runner.py main",
                file=name,
                line=number,
            )
        )
    return UserFile(
        name=name, path=path, kind="deepspeed-env", text=text, keys=values, lines=lines, problems=tuple(problems)
    )


def _without_credential(row: str) -> str:
    """Return a line with a mask for what stands behind the name of a credential."""
    words = row.split()
    at = next((at for at, word in enumerate(words) if is_credential(word)), len(words))
    return masked_text(row, *words[at + 1 :])


def _script(text: str, *, name: str, path: Path | None, kind: Kind) -> UserFile:
    read = read_directives(text, name=name) if kind == "sbatch" else Directives()
    variables = {
        variable: Word(text=read.keys[key], line=read.lines[(key,)])
        for variable, key in _SLURM_VARIABLES.items()
        if read.keys.get(key, "").isdigit()
    }
    return UserFile(
        name=name,
        path=path,
        kind=kind,
        text=text,
        keys=read.keys,
        lines=read.lines,
        commands=tuple(launch_commands(text, variables=variables)),
        problems=tuple(read.problems),
        ignored=tuple(read.ignored),
    )
