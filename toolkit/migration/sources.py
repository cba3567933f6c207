"""The files of a migration: read, told apart, followed where one names another, and joined by tool."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any

from toolkit.config.yaml_text import read_named
from toolkit.errors import Problem, SpecError, raise_all
from toolkit.migration.accelerate import ACCELERATE, LAUNCHER
from toolkit.migration.axolotl import AXOLOTL, is_preference
from toolkit.migration.deepspeed import DEEPSPEED
from toolkit.migration.llama_factory import LLAMA_FACTORY, STAGES
from toolkit.migration.ms_swift import COMMAND, MS_SWIFT
from toolkit.migration.outcomes import Entry, Leaf, shown
from toolkit.migration.table import Table, flattened
from toolkit.migration.trainer import TRAINER
from toolkit.migration.trl import OTHER_METHODS, TRL
from toolkit.user_files import positions
from toolkit.user_files.commands import Command, Option, arguments_of, launch_commands
from toolkit.user_files.shell import Word, statements

# All tables, in the order in which a file counts as of one if several know as many of its keys.
TABLES: tuple[Table, ...] = (TRAINER, TRL, LLAMA_FACTORY, MS_SWIFT, AXOLOTL, ACCELERATE, DEEPSPEED)
TRAINERS = (TRAINER, TRL, LLAMA_FACTORY, MS_SWIFT, AXOLOTL)

# DeepSpeed files that tools ship, by the beginnings of their names: stage, and devices of optimizer and parameters.
_SHIPPED: Mapping[str, tuple[int, str, str]] = {
    "zero0": (0, "none", "none"),
    "ds_z0_config": (0, "none", "none"),
    "zero1": (1, "none", "none"),
    "zero1_torch_compile": (1, "none", "none"),
    "zero2": (2, "none", "none"),
    "zero2_torch_compile": (2, "none", "none"),
    "ds_z2_config": (2, "none", "none"),
    "zero2_offload": (2, "cpu", "none"),
    "ds_z2_offload_config": (2, "cpu", "none"),
    "zero3": (3, "none", "none"),
    "zero3_bf16": (3, "none", "none"),
    "ds_z3_config": (3, "none", "none"),
    "ds_z3_fp8_config": (3, "none", "none"),
    "zero3_offload": (3, "cpu", "cpu"),
    "zero3_bf16_cpuoffload_all": (3, "cpu", "cpu"),
    "ds_z3_offload_config": (3, "cpu", "cpu"),
}
# Commands of tools by the word that starts them, and what their first words must be to train on documents.
_TOOLS: Mapping[str, tuple[Table, tuple[str, ...]]] = {
    "swift": (MS_SWIFT, ("sft", "pt")),
    "llamafactory-cli": (LLAMA_FACTORY, ("train",)),
    "lmf": (LLAMA_FACTORY, ("train",)),
    "axolotl": (AXOLOTL, ("train", "preprocess")),
}
_SCRIPTS: Mapping[str, Table] = {
    "axolotl.cli.train": AXOLOTL,
    "axolotl.cli.preprocess": AXOLOTL,
    "src/train.py": LLAMA_FACTORY,
    "swift/cli/sft.py": MS_SWIFT,
    "swift.cli.sft": MS_SWIFT,
}
_CONFIGS = (".yaml", ".yml", ".json")
_MAKES_SENSE = 2  # keys that a table must know of a file, or all of a file that has fewer


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What the files say in one tool's keys.

    Args:
        table: Table of the tool.
        leaves: Values by path.
        content: The same, nested, of a DeepSpeed file.
        replaced: Values that another file or a command line replaces.
    """

    table: Table
    leaves: Mapping[str, Leaf]
    content: Mapping[str, Any] = field(default_factory=dict)
    replaced: tuple[Entry, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """All that the files of a migration say.

    Args:
        names: Files, in the order of the user and then of what they name, each with its tool.
        trainer: Arguments of Trainer, or of a tool that is built on it.
        accelerate: Configuration of Accelerate.
        launcher: Options of another launcher, and variables.
        deepspeed: DeepSpeed file.
    """

    names: tuple[tuple[str, str], ...]
    trainer: Part | None
    accelerate: Part | None
    launcher: Part | None
    deepspeed: Part | None

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts there are: first those that others depend on."""
        found = (self.accelerate, self.launcher, self.deepspeed, self.trainer)
        return tuple(part for part in found if part is not None)


@dataclass(slots=True)
class _Collector:
    names: dict[str, str] = field(default_factory=dict)
    found: dict[str, Part] = field(default_factory=dict)  # by trainer, accelerate, launcher, deepspeed
    homes: dict[str, str] = field(default_factory=dict)  # file that a part was first read from
    seen: set[Path] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)

    def read(
        self, source: str | Path, *, beside: Path | None = None, why: Leaf | None = None, over: Table | None = None
    ) -> None:
        """Read a file or a command line; `over` is the tool whose command names it, and wins over it."""
        if beside is None and isinstance(source, str) and _is_command(source):
            self._script(source, name="command line", folder=Path())
            return
        path = _found(Path(source), beside)
        if path.exists() and (real := path.resolve()) in self.seen:
            return
        if path.exists():
            self.seen.add(real)
        try:
            text = read_named(path, kind="a configuration:")
        except SpecError as error:
            self.problems += [
                problem if why is None else replace(problem, file=why.file, line=why.line) for problem in error.problems
            ]
            return
        name = str(path)
        if path.suffix in (".sh", ".bash") or text.startswith("#!") or "#SBATCH" in text:
            self._script(text, name=name, folder=path.parent)
            return
        self._configuration(text, name=name, path=path, over=over)

    def _configuration(self, text: str, *, name: str, path: Path, over: Table | None) -> None:
        try:
            if path.suffix == ".json" or text.lstrip().startswith("{"):
                keys, lines = positions.read_json(text, name=name)
            else:
                keys, lines, twice = positions.read_yaml(text, name=name)
                for key in twice:
                    message = (
                        f"{name}, line {lines[key]}: {positions.dotted(key)} appears twice, and the last one is read"
                    )
                    self.problems.append(
                        Problem(
                            code="YAML_DUPLICATE", key=positions.dotted(key), message=message, fix="Keep one of the two"
                        )
                    )
        except SpecError as error:
            if _is_command(text):
                self._script(text, name=name, folder=path.parent)
            else:
                self.problems += error.problems
            return
        table = over or table_of(keys)
        if table is None:
            self.problems.append(_unknown(name, keys))
            return
        if method := _other_method(keys, table):
            self.problems.append(_refused_method(name, table, method))
            return
        self.add(table, keys, lines=lines, name=name, folder=path.parent, wins=False)

    def add(
        self,
        table: Table,
        keys: Mapping[str, Any],
        *,
        lines: Mapping[tuple[str, ...], int],
        name: str,
        folder: Path,
        wins: bool,
    ) -> None:
        """Add the keys of a file, and read the files that it names."""
        if self.names.get(name) in (None, LAUNCHER.tool, ACCELERATE.tool) and (
            table in TRAINERS or name not in self.names
        ):
            self.names[name] = table.tool
        nested = keys.get("deepspeed")
        whole = table.keys if table.has_whole else ()
        top = {key: value for key, value in keys.items() if not (key == "deepspeed" and isinstance(nested, Mapping))}
        leaves = {
            key: Leaf(key=key, value=value, file=name, line=positions.line_of(lines, key))
            for key, value in flattened(top, whole)
        }
        self._join(Part(table=table, leaves=leaves, content=dict(keys) if table is DEEPSPEED else {}), name, wins=wins)
        if isinstance(nested, Mapping) and table in TRAINERS:
            section = "deepspeed."
            inner = {
                key: Leaf(
                    key=key, value=value, file=name, line=positions.line_of(lines, section + key), section=section
                )
                for key, value in flattened(nested, ())
            }
            self._join(Part(table=DEEPSPEED, leaves=inner, content=dict(nested)), name, wins=False)
        for key in (
            "deepspeed",
            "deepspeed_config",
            "deepspeed_config.deepspeed_config_file",
            "deepspeed_config_file",
            "fsdp",
        ):
            leaf = leaves.get(key)
            if leaf is not None and isinstance(leaf.value, str) and leaf.value:
                self._follow(leaf, folder, table)

    def _follow(self, leaf: Leaf, folder: Path, table: Table) -> None:
        """Read the DeepSpeed file that a key names, or take one that a tool ships by its name."""
        if leaf.key == "fsdp" and not str(leaf.value).endswith(".json"):
            return
        path = _found(Path(leaf.value), folder)
        shipped = _SHIPPED.get(PurePath(leaf.value).stem)
        if shipped is not None and not path.is_file():
            stage, optimizer, parameters = shipped
            zero = {"stage": stage, "offload_optimizer": {"device": optimizer}, "offload_param": {"device": parameters}}
            content = {
                "zero_optimization": zero,
                "gradient_clipping": "auto",
                "bf16": {"enabled": "auto"},
                "fp16": {"enabled": "auto"},
            }
            inner = {
                key: replace(leaf, key=key, value=value, section=f"{leaf.key}: ")
                for key, value in flattened({"zero_optimization": zero}, ())
                if value != "none"
            }
            self._join(Part(table=DEEPSPEED, leaves=inner, content=content), leaf.value, wins=False)
            return
        self.read(leaf.value, beside=folder, why=leaf, over=None)

    def _script(self, text: str, *, name: str, folder: Path) -> None:
        found = False
        for command in launch_commands(text):
            found |= self._command(command, name=name, folder=folder)
        for statement in statements(text):
            found |= self._tool_command(statement.words, statement.environment, name=name, folder=folder)
        if not found:
            fix = "Name a script with such a command: trl sft, accelerate launch, torchrun, deepspeed, swift sft, llamafactory-cli train or axolotl train"
            message = f"{name} has no command that starts training"
            self.problems.append(Problem(code="MIGRATE_UNKNOWN", key=name, message=message, fix=fix))

    def _command(self, command: Command, *, name: str, folder: Path) -> bool:
        if command.launcher == "trl" and command.script != "sft":
            self.problems.append(_refused_method(name, TRL, command.script.upper()))
            return True
        self._environment(command.environment, name=name, folder=folder)
        if command.launcher == "accelerate":
            self._accelerate(command, name=name, folder=folder)
        elif command.options:
            keys, lines = _options(command.options)
            self.add(LAUNCHER, keys, lines=lines, name=name, folder=folder, wins=True)
        script = command.script
        table = (
            TRL
            if command.launcher == "trl"
            else next((each for end, each in _SCRIPTS.items() if script.endswith(end)), None)
        )
        self._arguments(table, command.arguments, command.positional, name=name, folder=folder)
        return True

    def _tool_command(
        self, words: tuple[Word, ...], environment: Mapping[str, Word], *, name: str, folder: Path
    ) -> bool:
        for at, word in enumerate(words[:-1]):
            tool = _TOOLS.get(PurePath(word.text).name)
            if tool is None:
                continue
            table, trains = tool
            method = words[at + 1].text
            if method not in trains:
                self.problems.append(_refused_method(name, table, method))
                return True
            self._environment(environment, name=name, folder=folder)
            arguments, positional = arguments_of(words[at + 2 :])
            if table is MS_SWIFT:
                arguments = (*arguments, Option(name=COMMAND, values=(method,), line=word.line))
            self._arguments(table, arguments, positional, name=name, folder=folder)
            return True
        return False

    def _environment(self, environment: Mapping[str, Word], *, name: str, folder: Path) -> None:
        known = {key: word for key, word in environment.items() if word.is_known}
        if known:
            lines: dict[tuple[str, ...], int] = {(key,): word.line for key, word in known.items()}
            self.add(
                LAUNCHER,
                {key: word.text for key, word in known.items()},
                lines=lines,
                name=name,
                folder=folder,
                wins=True,
            )

    def _accelerate(self, command: Command, *, name: str, folder: Path) -> None:
        keys, lines = _options(command.options)
        made: dict[str, Any] = {}
        places: dict[tuple[str, ...], int] = {}
        for key, value in keys.items():
            section = next(
                (known.partition(".")[0] for known in ACCELERATE.keys if known.partition(".")[2] == key), None
            )
            (made.setdefault(section, {}) if section else made)[key] = value
            places[(*((section,) if section else ()), key)] = lines[(key,)]
        self.add(ACCELERATE, made, lines=places, name=name, folder=folder, wins=True)
        if isinstance(file := keys.get("config_file"), str):
            self.read(
                file,
                beside=folder,
                why=Leaf(key="config_file", value=file, file=name, line=lines[("config_file",)]),
                over=ACCELERATE,
            )

    def _arguments(
        self, table: Table | None, arguments: Iterable[Option], positional: Iterable[Word], *, name: str, folder: Path
    ) -> None:
        keys, lines = _options(arguments)
        files = [word for word in positional if word.text.endswith(_CONFIGS)]
        for word in positional:
            key, equals, value = word.text.partition("=")
            if equals and re.fullmatch(r"\w+", key):
                keys[key], lines[(key,)] = value, word.line
        table = table or table_of(keys) or (TRAINER if keys else None)
        if isinstance(file := keys.get("config"), str) and table in (TRL, MS_SWIFT):
            files.append(Word(text=file, line=lines[("config",)]))
            del keys["config"]
        if table is not None and (method := _other_method(keys, table)):
            self.problems.append(_refused_method(name, table, method))
            return
        if keys and table is not None:
            self.add(table, keys, lines=lines, name=name, folder=folder, wins=True)
        for word in files:
            why = Leaf(key="config", value=word.text, file=name, line=word.line)
            self.read(
                word.text,
                beside=folder,
                why=why,
                over=table if table in (TRL, MS_SWIFT, AXOLOTL, LLAMA_FACTORY) else None,
            )

    def _join(self, part: Part, name: str, *, wins: bool) -> None:
        """Add a part to those of its tool: a command line wins over a file; two files must not disagree."""
        group = _group(part.table)
        old = self.found.get(group)
        if old is None:
            self.found[group], self.homes[group] = part, name
            return
        table = _joined_table(old.table, part.table)
        if table is None or (group == "deepspeed" and self.homes[group] != name):
            self.problems.append(_two(self.homes[group], old.table, name, part.table))
            return
        leaves = dict(old.leaves)
        replaced = [*old.replaced, *part.replaced]
        for key, leaf in part.leaves.items():
            known = leaves.get(key)
            if known is None:
                leaves[key] = leaf
            elif wins or _from_script(known) or _from_script(leaf):
                loser, winner = (known, leaf) if wins or _from_script(leaf) else (leaf, known)
                leaves[key] = winner
                replaced.append(
                    Entry(leaf=loser, tool=table.tool, outcome="not needed", reason=f"{winner.place} says it, and wins")
                )
            elif known.value == leaf.value:
                replaced.append(
                    Entry(leaf=leaf, tool=table.tool, outcome="not needed", reason=f"{known.place} says the same")
                )
            else:
                self.problems.append(_disagreement(known, leaf))
        self.found[group] = Part(
            table=table, leaves=leaves, content={**old.content, **part.content}, replaced=tuple(replaced)
        )


def read_sources(files: Iterable[str | Path]) -> Sources:
    """Read files and command lines, and what they name.

    Raises:
        SpecError: Of every file that cannot be read; MIGRATE_UNKNOWN for one of no tool that is known, MIGRATE_METHOD for one that
            trains in another way than on documents, MIGRATE_CONTRADICTION for two that do not go together.
    """
    collector = _Collector()
    for file in files:
        collector.read(file)
    raise_all(SpecError, dict.fromkeys(collector.problems))
    found = collector.found
    return Sources(
        names=tuple(collector.names.items()),
        trainer=found.get("trainer"),
        accelerate=found.get("accelerate"),
        launcher=found.get("launcher"),
        deepspeed=found.get("deepspeed"),
    )


def table_of(keys: Mapping[str, Any]) -> Table | None:
    """Return the table that knows most of a file's keys; None if none knows enough of them."""
    sections = {key for key, value in keys.items() if isinstance(value, Mapping)}
    scores = {}
    for table in TABLES:
        names = table.names
        known = [
            key
            for key in keys
            if key in names and not (key in ("fp16", "bf16") and (key in sections) != (table is DEEPSPEED))
        ]
        scores[table.tool] = len(known)
    best = max(TABLES, key=lambda table: scores[table.tool])
    return best if scores[best.tool] >= min(_MAKES_SENSE, len(keys)) and scores[best.tool] else None


def _group(table: Table) -> str:
    return {ACCELERATE.tool: "accelerate", LAUNCHER.tool: "launcher", DEEPSPEED.tool: "deepspeed"}.get(
        table.tool, "trainer"
    )


def _joined_table(one: Table, other: Table) -> Table | None:
    if one is other or other is TRAINER:
        return one
    return other if one is TRAINER else None


def _from_script(leaf: Leaf) -> bool:
    return leaf.file == "command line" or leaf.file.endswith((".sh", ".bash", ".sbatch", ".slurm"))


def _found(path: Path, beside: Path | None) -> Path:
    if path.is_absolute() or path.exists() or beside is None:
        return path
    return beside / path if (beside / path).exists() else path


def _is_command(text: str) -> bool:
    return bool(re.search(r"\s", text.strip())) and any(
        PurePath(word.text).name in ("accelerate", "torchrun", "deepspeed", "trl", "python", "python3", *_TOOLS)
        for statement in statements(text)
        for word in statement.words
    )


def _options(options: Iterable[Option]) -> tuple[dict[str, Any], dict[tuple[str, ...], int]]:
    """Return the values of options by name, with those of a switch as true, and their lines."""
    keys: dict[str, Any] = {}
    lines: dict[tuple[str, ...], int] = {}
    for option in options:
        keys[option.name] = True if option.value is None else option.value
        lines[(option.name,)] = option.line
    return keys, lines


def _other_method(keys: Mapping[str, Any], table: Table) -> str:
    """Return the method that a file trains by, if it is not training on documents."""
    if table is AXOLOTL:
        return is_preference(keys)
    if table is LLAMA_FACTORY:
        return STAGES.get(str(keys.get("stage")), "")
    if table is MS_SWIFT:
        return str(keys.get("rlhf_type") or "")
    if table in (TRL, TRAINER):
        return next((method for key, method in OTHER_METHODS.items() if keys.get(key) is not None), "")
    return ""


def _refused_method(name: str, table: Table, method: str) -> Problem:
    return Problem(
        code="MIGRATE_METHOD",
        key=name,
        message=f"{name} trains by {method} of {table.tool}: a job trains on documents, conversations and completions",
        fix="Keep that tool for it; what it starts from may be trained by a job first",
    )


def _unknown(name: str, keys: Mapping[str, Any]) -> Problem:
    known = ", ".join(table.tool for table in TABLES)
    listed = ", ".join(list(keys)[:5])
    is_job = {"model", "cluster"} <= set(keys) and isinstance(keys.get("cluster"), Mapping)
    return Problem(
        code="MIGRATE_UNKNOWN",
        key=name,
        message=f"{name} is a job already"
        if is_job
        else f"{name} is a file of no tool that is known here: its keys are {shown(listed) or 'none'}",
        fix="`toolkit validate` checks it" if is_job else f"Name files of {known}, or scripts with their commands",
    )


def _two(first: str, one: Table, second: str, other: Table) -> Problem:
    return Problem(
        code="MIGRATE_CONTRADICTION",
        key=second,
        message=f"{first} ({one.tool}) and {second} ({other.tool}) cannot be of one run",
        fix="Name the files of one run",
    )


def _disagreement(one: Leaf, other: Leaf) -> Problem:
    return Problem(
        code="MIGRATE_CONTRADICTION",
        key=other.key,
        message=f"{one.path}={shown(one.value)} ({one.place}) and {other.path}={shown(other.value)} ({other.place}) are two values of one key",
        fix="Make both files say the same, or leave one of the two keys out",
    )
