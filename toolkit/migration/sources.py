"""The files of a migration: read, told apart, followed where one names another, and joined by tool."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from toolkit.config.yaml_text import read_named
from toolkit.errors import Problem, SpecError, raise_all
from toolkit.migration.accelerate import ACCELERATE
from toolkit.migration.deepspeed import DEEPSPEED
from toolkit.migration.detection import (
    TRAINERS,
    disagreement,
    group_of,
    joined_table,
    other_method,
    refused_method,
    table_of,
    two_files,
    unknown_file,
)
from toolkit.migration.launcher import LAUNCHER
from toolkit.migration.outcomes import Entry, Leaf
from toolkit.migration.scripts import Said, is_command, is_script, said_by
from toolkit.migration.shipped import shipped_accelerate, shipped_deepspeed
from toolkit.migration.table import Table, flattened, size_fault
from toolkit.migration.trainer import TRAINER
from toolkit.user_files import positions
from toolkit.user_files.kinds import kind_of_text
from toolkit.user_files.read import read_text

# Name in messages of a command that was given as a text.
TEXT_NAME = "command line"
# Keys that name a DeepSpeed file, and one that names a configuration of Accelerate.
_DEEPSPEED_FILES = ("deepspeed", "deepspeed_config", "deepspeed_config.deepspeed_config_file")
_ACCELERATE_FILE = "accelerate_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What the files say in one tool's keys.

    Args:
        table: Table of the tool.
        leaves: Values by path.
        content: The same, nested, of a DeepSpeed file.
        replaced: Values that another file or a command line replaces, or that only the shell knows.
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
        launcher: Options of another launcher, directives of SLURM, and variables.
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
        self, source: str | Path, *, beside: Path | None = None, why: Leaf | None = None, table: Table | None = None
    ) -> None:
        """Read a file or a command line.

        Args:
            source: Path, or a command.
            beside: Folder of the file that names it.
            why: Key that names it.
            table: Table of the tool that reads it, where that is known.
        """
        if beside is None and isinstance(source, str) and is_command(source) and not Path(source).exists():
            self._script(source, name=TEXT_NAME, folder=Path())
            return
        path = _found(Path(source), beside)
        if path.exists():
            if (real := path.resolve()) in self.seen:
                return
            self.seen.add(real)
        try:
            text = read_named(path, kind="a configuration:")
        except SpecError as error:
            self.problems += [
                problem if why is None else replace(problem, file=why.file, line=why.line) for problem in error.problems
            ]
            return
        name = str(path)
        if is_script(text, name):
            self._script(text, name=name, folder=path.parent)
        elif kind_of_text(text, name=name) in ("hostfile", "deepspeed-env"):
            self._launching(text, name=name, path=path)
        else:
            self._configuration(text, name=name, path=path, table=table)

    def _configuration(self, text: str, *, name: str, path: Path, table: Table | None) -> None:
        try:
            if path.suffix == ".json" or text.lstrip().startswith("{"):
                keys, lines = positions.read_json(text, name=name)
            else:
                keys, lines, twice = positions.read_yaml(text, name=name)
                self.problems += [_twice(name, positions.dotted(key), lines[key]) for key in twice]
        except SpecError as error:
            if is_command(text):
                self._script(text, name=name, folder=path.parent)
            else:
                self.problems += error.problems
            return
        if fault := size_fault(keys):
            message = f"{name} {fault}, far more than a configuration has"
            self.problems.append(
                Problem(code="YAML_RECURSIVE", key=name, message=message, fix="Write out what the run needs")
            )
            return
        table = table or table_of(keys)
        if table is None:
            self.problems.append(unknown_file(name, keys))
        elif method := other_method(keys, table):
            self.problems.append(refused_method(name, table, method))
        else:
            self.add(Said(table=table, keys=keys, lines=dict(lines)), name=name, folder=path.parent)

    def _launching(self, text: str, *, name: str, path: Path) -> None:
        """Read a hostfile, or the variables of DeepSpeed's launcher."""
        file = read_text(text, name=name, path=path)
        self.problems += file.problems
        keys: dict[str, Any] = dict(file.keys)
        lines = dict(file.lines)
        if file.kind == "hostfile":
            keys, lines = (
                {"hosts": {host: int(slots) for host, slots in keys.items()}},
                {("hosts", *key): line for key, line in lines.items()},
            )
        self.add(Said(table=LAUNCHER, keys=keys, lines=lines), name=name, folder=path.parent)

    def _script(self, text: str, *, name: str, folder: Path) -> None:
        said, problems = said_by(text, name=name)
        self.problems += problems
        for each in () if problems else said:
            self.add(each, name=name, folder=folder, is_option=True)

    def add(self, said: Said, *, name: str, folder: Path, is_option: bool = False) -> None:
        """Add what a file or a command says, and read the files that it names."""
        table, keys = said.table, said.keys
        if name not in self.names or (table in TRAINERS and self.names[name] in (LAUNCHER.tool, ACCELERATE.tool)):
            self.names[name] = table.tool
        inline = keys.get("deepspeed") if table in TRAINERS else None
        inline = inline if isinstance(inline, Mapping) else None
        top = {key: value for key, value in keys.items() if inline is None or key != "deepspeed"}

        def leaf(key: str, value: Any, section: str = "") -> Leaf:
            line = positions.line_of(said.lines, section + key)
            return Leaf(key=key, value=value, file=name, line=line, section=section, is_option=is_option)

        leaves = {key: leaf(key, value) for key, value in flattened(top, table.keys if table.has_whole else ())}
        unread = tuple(_unread(leaf(key, value), table) for key, value in said.unread.items())
        self._join(
            Part(table=table, leaves=leaves, content=dict(keys) if table is DEEPSPEED else {}, replaced=unread), name
        )
        if inline is not None:
            inner = {key: leaf(key, value, "deepspeed.") for key, value in flattened(inline, ())}
            self._join(Part(table=DEEPSPEED, leaves=inner, content=dict(inline)), name)
        for file, line in said.files:
            reads = None if table is TRAINER else table
            self.read(file, beside=folder, why=Leaf(key="config", value=file, file=name, line=line), table=reads)
        for key in (*_DEEPSPEED_FILES, _ACCELERATE_FILE):
            if isinstance(named := leaves[key].value if key in leaves else None, str) and named:
                self._follow(leaves[key], named, folder)

    def _follow(self, leaf: Leaf, named: str, folder: Path) -> None:
        """Read the file that a key names, or take what a tool ships under that name."""
        path = _found(Path(named), folder)
        of_accelerate = leaf.key == _ACCELERATE_FILE
        shipped = None if path.is_file() else shipped_accelerate(named) if of_accelerate else shipped_deepspeed(named)
        table = ACCELERATE if of_accelerate else DEEPSPEED
        if shipped is None:
            self.read(named, beside=folder, why=leaf, table=table)
            return
        inner = {
            key: replace(leaf, key=key, value=value, section=f"{leaf.key}: ", is_option=False)
            for key, value in flattened(shipped, ())
            if value != "auto"
        }
        self._join(Part(table=table, leaves=inner, content=shipped if table is DEEPSPEED else {}), named)

    def _join(self, part: Part, name: str) -> None:
        """Add a part to those of its tool: a command line wins over a file; two files must not disagree."""
        group = group_of(part.table)
        old = self.found.get(group)
        if old is None:
            self.found[group], self.homes[group] = part, name
            return
        table = joined_table(old.table, part.table)
        if table is None or (group == "deepspeed" and self.homes[group] != name):
            self.problems.append(two_files(self.homes[group], old.table, name, part.table))
            return
        leaves = dict(old.leaves)
        replaced = [*old.replaced, *part.replaced]
        for key, leaf in part.leaves.items():
            known = leaves.get(key)
            if known is None:
                leaves[key] = leaf
            elif known.is_option or leaf.is_option:
                loser, winner = (known, leaf) if leaf.is_option else (leaf, known)
                leaves[key] = winner
                replaced.append(_unneeded(loser, table, f"{winner.place} says it, and wins"))
            elif known.value == leaf.value:
                replaced.append(_unneeded(leaf, table, f"{known.place} says the same"))
            else:
                self.problems.append(disagreement(known, leaf))
        content = {**old.content, **part.content}
        self.found[group] = Part(table=table, leaves=leaves, content=content, replaced=tuple(replaced))


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
    parts: dict[str, Part | None] = {
        group: collector.found.get(group) for group in ("trainer", "accelerate", "launcher", "deepspeed")
    }
    return Sources(names=tuple(collector.names.items()), **parts)


def _found(path: Path, beside: Path | None) -> Path:
    if path.is_absolute() or path.exists() or beside is None:
        return path
    return beside / path if (beside / path).exists() else path


def _unneeded(leaf: Leaf, table: Table, reason: str) -> Entry:
    return Entry(leaf=leaf, tool=table.tool, outcome="not needed", reason=reason)


def _unread(leaf: Leaf, table: Table) -> Entry:
    fix = "Write it out, or set the variable in the script"
    return Entry(leaf=leaf, tool=table.tool, outcome="not carried", reason="only the shell knows its value", fix=fix)


def _twice(name: str, key: str, line: int) -> Problem:
    message = f"{name}, line {line}: {key} appears twice, and the last one is read"
    return Problem(code="YAML_DUPLICATE", key=key, message=message, fix="Keep one of the two")
