"""Files that will run together: which of them names which, what each sets, and how many ranks they start."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.errors import SpecError
from toolkit.user_files.arguments import TRAINER_CLASS, TRL_COMMON, Argument, argument_classes
from toolkit.user_files.commands import Command, Option
from toolkit.user_files.kinds import Kind
from toolkit.user_files.read import UserFile, read_file

# Options and keys that name another file, with the kind that it must be.
_LAUNCHER_REFERENCES: Mapping[str, Kind] = {
    "config_file": "accelerate",
    "deepspeed_config_file": "deepspeed",
    "deepspeed_hostfile": "hostfile",
    "hostfile": "hostfile",
}
_SCRIPT_REFERENCES: Mapping[str, Kind] = {
    "deepspeed": "deepspeed",
    "deepspeed_config": "deepspeed",
    "config": "trainer-arguments",
    "accelerate_config": "accelerate",
}
_METHODS = {"sft": "SFTConfig", "dpo": "DPOConfig", "kto": "KTOConfig", "grpo": "GRPOConfig", "rloo": "RLOOConfig"} | {
    "reward": "RewardConfig"
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A file that another names.

    Args:
        kind: Kind that it must be.
        target: Path as it is written.
        file: File that names it.
        key: Key or option that does.
        line: Line of that key.
    """

    kind: Kind
    target: str
    file: UserFile
    key: str
    line: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A value that a file sets.

    Args:
        value: The value; of an argument on a command line its words, of a switch True.
        file: The file.
        key: Key or option.
        line: Its line.
        is_text: Whether it is text that a parser of command lines converts.
        is_known: Whether it is what the script gets, rather than what a shell expands.
    """

    value: Any
    file: UserFile
    key: str
    line: int | None
    is_text: bool = False
    is_known: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Files that run together.

    Args:
        files: All of them.
        command: The one command that starts training, with its file; None if there is none, or several.
        deepspeed: The one DeepSpeed file; None as above. So for the next three.
        accelerate: The one configuration of Accelerate.
        arguments: The one file of Trainer's or TRL's arguments.
        hostfile: The one hostfile.
        sbatch: The one batch script.
        said: Arguments of the training script, by name; a command line's replace those of a file.
        owner: Argument class that these belong to.
        references: Files that others name.
    """

    files: tuple[UserFile, ...]
    command: tuple[UserFile, Command] | None = None
    deepspeed: UserFile | None = None
    accelerate: UserFile | None = None
    arguments: UserFile | None = None
    hostfile: UserFile | None = None
    sbatch: UserFile | None = None
    said: Mapping[str, Said] = field(default_factory=dict)
    owner: str = TRAINER_CLASS
    references: tuple[Reference, ...] = ()

    @property
    def uses_trainer(self) -> bool:
        """Whether arguments of Trainer are known."""
        names = argument_classes()[self.owner]
        return any(name in names for name in self.said)

    @property
    def is_trl(self) -> bool:
        """Whether TRL parses the arguments: its file gives defaults to a parser of command lines, which converts texts."""
        return self.owner != TRAINER_CLASS

    def argument(self, name: str) -> Argument | None:
        """Return the field of an argument among the classes that are parsed together."""
        classes = argument_classes()
        owners = (self.owner, *TRL_COMMON) if self.is_trl else (self.owner,)
        return next((classes[owner][name] for owner in owners if name in classes[owner]), None)


def gather(sources: Iterable[str | Path]) -> tuple[tuple[UserFile, ...], list[tuple[str, SpecError]]]:
    """Read files and those that they name, which lie beside them or in the working directory; return errors with names."""
    files: list[UserFile] = []
    errors: list[tuple[str, SpecError]] = []
    waiting: list[str | Path] = list(sources)
    seen: set[Path] = set()
    named = len(waiting)
    for number, source in enumerate(waiting):
        path = Path(source)
        try:
            resolved = path.resolve()
        except (OSError, ValueError, RuntimeError):
            resolved = path
        if resolved in seen:
            continue
        seen.add(resolved)
        try:
            file = read_file(source)
        except SpecError as error:
            if number < named or error.codes != ("FILE_KIND",):
                errors.append((str(source), error))
            continue
        files.append(file)
        waiting += [found for each in references(file) if (found := located(each)) is not None]
    return tuple(files), errors


def assemble(files: Sequence[UserFile]) -> Setup:
    """Return files as they run together; of a kind that occurs several times none is paired with others."""
    commands = [(file, command) for file in files for command in file.commands]
    command = commands[0] if len(commands) == 1 else None
    arguments = _only(files, "trainer-arguments")
    said = dict(_said(arguments, command))
    return Setup(
        files=tuple(files),
        command=command,
        deepspeed=_only(files, "deepspeed"),
        accelerate=_only(files, "accelerate"),
        arguments=arguments,
        hostfile=_only(files, "hostfile"),
        sbatch=_only(files, "sbatch"),
        said=said,
        owner=_owner(said, command),
        references=tuple(each for file in files for each in references(file)),
    )


def references(file: UserFile) -> Iterator[Reference]:
    """Yield the files that a file names."""
    if file.kind == "accelerate":
        section = file.keys.get("deepspeed_config")
        for key, kind in (("deepspeed_config_file", "deepspeed"), ("deepspeed_hostfile", "hostfile")):
            target = section.get(key) if isinstance(section, Mapping) else None
            if isinstance(target, str) and target != "none":
                path = f"deepspeed_config.{key}"
                yield Reference(kind=kind, target=target, file=file, key=path, line=file.line(path))  # type: ignore[arg-type]
    if file.kind == "trainer-arguments" and isinstance(target := file.keys.get("deepspeed"), str):
        yield Reference(kind="deepspeed", target=target, file=file, key="deepspeed", line=file.line("deepspeed"))
    for command in file.commands:
        known: list[tuple[Iterable[Option], Mapping[str, Kind]]] = [
            (command.options, _LAUNCHER_REFERENCES),
            (command.arguments, _SCRIPT_REFERENCES),
        ]
        for options, table in known:
            for option in options:
                if option.name in table and option.value and option.is_known and not option.value.startswith("{"):
                    yield Reference(
                        kind=table[option.name], target=option.value, file=file, key=option.name, line=option.line
                    )
        for word in command.positional:
            if word.text.endswith((".json", ".yaml", ".yml")) and word.is_known and len(command.positional) == 1:
                yield Reference(kind="trainer-arguments", target=word.text, file=file, key="arguments", line=word.line)


def located(reference: Reference) -> Path | None:
    """Return where a named file is: as it is written, or beside the file that names it; None if it is nowhere."""
    target = Path(reference.target).expanduser()
    beside = [target] if reference.file.path is None else [target, reference.file.path.parent / target]
    for path in beside:
        try:
            if path.is_file():
                return path
        except (OSError, ValueError):
            return None
    return None


def _only(files: Sequence[UserFile], kind: Kind) -> UserFile | None:
    found = [file for file in files if file.kind == kind]
    return found[0] if len(found) == 1 else None


def _said(arguments: UserFile | None, command: tuple[UserFile, Command] | None) -> Iterator[tuple[str, Said]]:
    if arguments is not None:
        for key, value in arguments.keys.items():
            yield key, Said(value=value, file=arguments, key=key, line=arguments.line(key))
    if command is None:
        return
    file, started = command
    for option in started.arguments:
        yield (
            option.name,
            Said(
                value=option.values,
                file=file,
                key=f"--{option.name}",
                line=option.line,
                is_text=True,
                is_known=option.is_known,
            ),
        )


def _owner(said: Mapping[str, Said], command: tuple[UserFile, Command] | None) -> str:
    """Return the argument class of a run: that of TRL's method, or the one that knows most of the names."""
    if command is not None:
        stem = Path(command[1].script).stem
        if stem in _METHODS:
            return _METHODS[stem]
    classes = argument_classes()
    known: Callable[[str], int] = lambda owner: sum(name in classes[owner] for name in said)  # noqa: E731
    best = max((TRAINER_CLASS, *_METHODS.values()), key=lambda owner: (known(owner), owner == TRAINER_CLASS))
    if best != TRAINER_CLASS:
        return best
    common = set().union(*(classes[owner] for owner in TRL_COMMON if owner in classes)) - {"model_name_or_path"}
    return "SFTConfig" if len(common.intersection(said)) >= 2 else TRAINER_CLASS
