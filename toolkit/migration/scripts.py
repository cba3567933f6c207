"""The commands of a script, or a quoted one, as keys of the tools that they start and of their launchers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from toolkit.errors import Problem
from toolkit.migration.accelerate import ACCELERATE
from toolkit.migration.axolotl import AXOLOTL
from toolkit.migration.detection import other_method, refused_method, table_of
from toolkit.migration.launcher import LAUNCHER
from toolkit.migration.llama_factory import LLAMA_FACTORY
from toolkit.migration.ms_swift import COMMAND, MS_SWIFT
from toolkit.migration.table import Table
from toolkit.migration.trainer import TRAINER
from toolkit.migration.trl import TRL
from toolkit.user_files.commands import Command, Option, arguments_of, launch_commands
from toolkit.user_files.read import UserFile, read_text
from toolkit.user_files.shell import statements
from toolkit.user_files.shell_variables import Word

# Commands of tools by the word that starts them, and their words that train on documents.
_TOOLS: Mapping[str, tuple[Table, tuple[str, ...]]] = {
    "swift": (MS_SWIFT, ("sft", "pt")),
    "llamafactory-cli": (LLAMA_FACTORY, ("train",)),
    "lmf": (LLAMA_FACTORY, ("train",)),
    "axolotl": (AXOLOTL, ("train",)),
}
# Their words that train otherwise; all others, such as export and preprocess, train nothing.
_TRAINS_OTHERWISE = ("rlhf", "rollout", "grpo", "dpo")
_SCRIPTS: Mapping[str, Table] = {
    "axolotl.cli.train": AXOLOTL,
    "scripts/finetune.py": AXOLOTL,
    "src/train.py": LLAMA_FACTORY,
    "swift/cli/sft.py": MS_SWIFT,
    "swift.cli.sft": MS_SWIFT,
    "scripts/sft.py": TRL,
    "run_clm.py": TRAINER,
}
_STARTERS = (
    "accelerate",
    "accelerate-launch",
    "torchrun",
    "deepspeed",
    "ds",
    "trl",
    "python",
    "python3",
    "srun",
    *_TOOLS,
)
_CONFIGS = (".yaml", ".yml", ".json")
_VARIABLE = re.compile(r"^[A-Z][A-Z0-9_]*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What a command says in the keys of one tool.

    Args:
        table: Table of the tool.
        keys: Values by key, sections nested.
        lines: Lines by the parts of a key's path.
        unread: Keys whose value only the shell knows, with what is written.
        files: Configurations that it names, each with its line.
    """

    table: Table
    keys: dict[str, Any]
    lines: dict[tuple[str, ...], int]
    unread: dict[str, str] = field(default_factory=dict)
    files: tuple[tuple[str, int], ...] = ()


def is_command(text: str) -> bool:
    """Return whether a text has a command of several words that may start training."""
    return bool(re.search(r"\s", text.strip())) and any(
        PurePath(word.text).name in _STARTERS for statement in statements(text) for word in statement.words
    )


def is_script(text: str, name: str) -> bool:
    """Return whether a file is a shell script, by its name and its first lines."""
    return name.endswith((".sh", ".bash", ".sbatch", ".slurm")) or text.startswith("#!") or "\n#SBATCH" in f"\n{text}"


def said_by(text: str, *, name: str) -> tuple[list[Said], list[Problem]]:
    """Return what the commands of a script say, launcher first, and the problems of those that are no training on documents."""
    trainings: list[list[Said]] = []
    problems: list[Problem] = []
    slurm = read_text(text, name=f"{name}.sbatch") if "#SBATCH" in text else None
    for command in launch_commands(text) if slurm is None else slurm.commands:
        if command.launcher == "trl" and command.script != "sft":
            problems.append(refused_method(name, TRL, command.script.upper()))
        elif found := list(_of_command(command)):
            trainings.append(found)
    for statement in statements(text):
        for at, word in enumerate(statement.words[:-1]):
            tool, method = PurePath(word.text).name, statement.words[at + 1].text
            if tool not in _TOOLS:
                continue
            table, trains = _TOOLS[tool]
            if method in trains:
                trainings.append(list(_of_tool(table, method, statement.words[at + 2 :], statement.environment)))
            elif method in _TRAINS_OTHERWISE:
                problems.append(refused_method(name, table, method))
            break
    if not trainings and not problems:
        fix = "Name a script with such a command: trl sft, accelerate launch, torchrun, deepspeed, swift sft, llamafactory-cli train or axolotl train"
        message = f"{name} has no command that starts training"
        problems.append(Problem(code="MIGRATE_UNKNOWN", key=name, message=message, fix=fix))
    if len(trainings) > 1:
        message = f"{name} has {len(trainings)} commands that start training, and a job is one run"
        fix = 'Quote one of them: `toolkit migrate "COMMAND"`'
        problems.append(Problem(code="MIGRATE_CONTRADICTION", key=name, message=message, fix=fix))
    said = [*_of_slurm(slurm), *(trainings[0] if trainings else ())]
    for each in said:
        if method := other_method(each.keys, each.table):
            problems.append(refused_method(name, each.table, method))
    return said, problems


def _of_command(command: Command) -> Iterator[Said]:
    """Yield what a launch command says; nothing for a Python script without arguments that are known."""
    known = (
        TRL
        if command.launcher == "trl"
        else next((each for end, each in _SCRIPTS.items() if command.script.endswith(end)), None)
    )
    arguments = _arguments(known, command.arguments, command.positional, launched=command.launcher != "python")
    if arguments is None and command.launcher == "python":
        return
    yield from _environment(command.environment)
    if command.launcher == "accelerate":
        yield _accelerate(command.options)
    elif command.options:
        keys, lines, unread = _options(command.options)
        yield Said(table=LAUNCHER, keys=keys, lines=lines, unread=unread)
    if arguments is not None and arguments.table is TRL:
        yield from _with_launcher(arguments)
    elif arguments is not None:
        yield arguments


def _of_tool(table: Table, method: str, words: tuple[Word, ...], environment: Mapping[str, Word]) -> Iterator[Said]:
    yield from _environment(environment)
    arguments, positional = arguments_of(words)
    if table is MS_SWIFT:
        arguments = (*arguments, Option(name=COMMAND, values=(method,), line=1))
    said = _arguments(table, arguments, positional, launched=True)
    if said is not None:
        yield said


def _arguments(
    table: Table | None, arguments: Iterable[Option], positional: Iterable[Word], *, launched: bool
) -> Said | None:
    """Return the arguments of a script, with the files among them."""
    keys, lines, unread = _options(arguments)
    files = [(word.text, word.line) for word in positional if word.text.endswith(_CONFIGS)]
    for word in positional:  # key=value, of LLaMA-Factory
        key, equals, value = word.text.partition("=")
        if equals and re.fullmatch(r"\w+", key):
            keys[key], lines[(key,)] = value, word.line
    table = table or table_of(keys) or (TRAINER if launched and (keys or files) else None)
    if table in (TRL, MS_SWIFT) and isinstance(file := keys.get("config"), str):
        files.append((file, lines[("config",)]))
        del keys["config"]
    if table is None or not (keys or files or unread):
        return None
    return Said(table=table, keys=keys, lines=lines, unread=unread, files=tuple(files))


def _with_launcher(said: Said) -> Iterator[Said]:
    """Yield the options of a command of TRL that it passes to `accelerate launch`, and the others."""
    launch = {key for key in said.keys if key not in TRL.names and (key in ACCELERATE.names or _section(key))}
    if launch:
        yield _nested({key: said.keys[key] for key in launch}, said.lines, {})
    keys = {key: value for key, value in said.keys.items() if key not in launch}
    yield Said(table=TRL, keys=keys, lines=said.lines, unread=said.unread, files=said.files)


def _accelerate(options: Iterable[Option]) -> Said:
    keys, lines, unread = _options(options)
    return _nested(keys, lines, unread)


def _nested(keys: Mapping[str, Any], lines: Mapping[tuple[str, ...], int], unread: dict[str, str]) -> Said:
    """Return options of `accelerate launch` in the sections that its file has them in."""
    made: dict[str, Any] = {}
    places: dict[tuple[str, ...], int] = {}
    for key, value in keys.items():
        section = _section(key)
        (made.setdefault(section, {}) if section else made)[key] = value
        places[(*((section,) if section else ()), key)] = lines[(key,)]
    file = keys.get("config_file")
    files = ((file, lines[("config_file",)]),) if isinstance(file, str) else ()
    return Said(table=ACCELERATE, keys=made, lines=places, unread=unread, files=files)


def _section(key: str) -> str:
    if key in ACCELERATE.names:
        return ""
    return next((known.partition(".")[0] for known in sorted(ACCELERATE.keys) if known.partition(".")[2] == key), "")


def _environment(environment: Mapping[str, Word]) -> Iterator[Said]:
    """Yield variables that are set for a command: those of launchers, and those that a user would export."""
    words = {key: word for key, word in environment.items() if key in LAUNCHER.keys or _VARIABLE.match(key)}
    if words:
        lines: dict[tuple[str, ...], int] = {(key,): word.line for key, word in words.items()}
        keys = {key: word.text for key, word in words.items() if word.is_known}
        unread = {key: word.text for key, word in words.items() if not word.is_known}
        yield Said(table=LAUNCHER, keys=keys, lines=lines, unread=unread)


def _of_slurm(file: UserFile | None) -> Iterator[Said]:
    """Yield the directives of an sbatch script."""
    if file is not None and file.keys:
        keys = {key.replace("-", "_"): value for key, value in file.keys.items()}
        lines: dict[tuple[str, ...], int] = {(key[0].replace("-", "_"),): line for key, line in file.lines.items()}
        yield Said(table=LAUNCHER, keys=keys, lines=lines)


def _options(options: Iterable[Option]) -> tuple[dict[str, Any], dict[tuple[str, ...], int], dict[str, str]]:
    """Return the values of options by name, with those of a switch as true, their lines, and what only the shell knows."""
    keys: dict[str, Any] = {}
    lines: dict[tuple[str, ...], int] = {}
    unread: dict[str, str] = {}
    for option in options:
        lines[(option.name,)] = option.line
        if option.is_known:
            keys[option.name] = True if option.value is None else option.value
        else:
            unread[option.name] = str(option.value)
    return keys, lines, unread
