"""Launch commands of a script: the launcher with its options, the script that it starts and that script's arguments."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from toolkit.user_files.shell import Statement, statements
from toolkit.user_files.shell_variables import Word

# Options of each launcher that take no value (accelerate commands/launch.py, torch distributed/run.py, deepspeed
# launcher/runner.py); compared with their own parsers by tests/user_files/test_commands.py.
SWITCHES: Mapping[str, frozenset[str]] = {
    "accelerate": frozenset(
        {
            *("cpu", "debug", "downcast_bf16", "dynamo_use_dynamic", "dynamo_use_fullgraph", "enable_cpu_affinity"),
            *("dynamo_use_regional_compilation", "fp8_use_autocast_during_eval", "help", "module", "multi_gpu"),
            *("no_python", "no_tpu_cluster", "quiet", "same_network", "tpu", "tpu_cluster", "tpu_use_sudo"),
            *("use_deepspeed", "use_fsdp", "use_megatron_lm", "use_parallelism_config"),
        }
    ),
    "torchrun": frozenset({"help", "module", "no_python", "run_path", "standalone", "virtual_local_rank"}),
    "deepspeed": frozenset(
        {
            *("bind_cores_to_rank", "force_multi", "help", "module", "no_local_rank", "no_python", "no_ssh"),
            *("no_ssh_check", "quiet", "save_pid"),
        }
    ),
}
_SHORT = {"H": "hostfile", "i": "include", "e": "exclude", "m": "module", "q": "quiet", "h": "help"}
_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate.commands.launch": "accelerate",
    "deepspeed": "deepspeed",
    "deepspeed.launcher.runner": "deepspeed",
}
_SHELLS = ("bash", "sh", "zsh", "dash")
_NEGATIVE = re.compile(r"^-\d|^-\.\d")
_TRL_METHODS = ("sft", "dpo", "kto", "grpo", "rloo", "reward")


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option of a command.

    Args:
        name: Name without dashes, with underscores.
        values: Words after it, up to the next option; none for a switch.
        line: Line of the option.
        is_known: Whether the shell would change none of its values.
    """

    name: str
    values: tuple[str, ...]
    line: int
    is_known: bool = True

    @property
    def value(self) -> str | None:
        """The value; None for a switch; several joined by blanks."""
        return " ".join(self.values) if self.values else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command that starts training.

    Args:
        launcher: accelerate, torchrun, deepspeed, python or trl.
        options: The launcher's own options.
        script: Script, module or method of TRL that it starts; "" if there is none.
        arguments: Arguments of the script.
        positional: Words among them that belong to no option.
        environment: Variables that are set for it.
        line: Line on which it begins.
        prefix: Words before the launcher, such as `srun --ntasks=2`.
    """

    launcher: str
    options: tuple[Option, ...]
    script: str
    arguments: tuple[Option, ...]
    positional: tuple[Word, ...] = ()
    environment: Mapping[str, Word] = field(default_factory=dict)
    line: int
    prefix: tuple[Word, ...] = ()

    def option(self, *names: str) -> Option | None:
        """Return the last of the launcher's options with one of these names."""
        return next((each for each in reversed(self.options) if each.name in names), None)

    def argument(self, *names: str) -> Option | None:
        """Return the last of the script's arguments with one of these names."""
        return next((each for each in reversed(self.arguments) if each.name in names), None)


def launch_commands(text: str, *, line: int = 1, variables: Mapping[str, Word] | None = None) -> Iterator[Command]:
    """Yield the commands of a script that start training, those inside `bash -c` too."""
    for statement in statements(text, line=line, variables=variables):
        yield from _launches(statement)


def _launches(statement: Statement) -> Iterator[Command]:
    words = statement.words
    for at, (shell, flag) in enumerate(pairwise(words)):
        if _base(shell.text) in _SHELLS and re.fullmatch(r"-\w*c", flag.text) and at + 2 < len(words):
            inner = words[at + 2]
            for command in launch_commands(inner.text, line=inner.line):
                yield _inside(command, statement, words[:at])
            return
    found = _launcher(words)
    if found is None:
        return
    launcher, first, begins = found
    rest = words[begins:]
    if launcher == "trl":
        yield _of_trl(rest, statement, words[first].line, words[:first])
        return
    options, script = _own_options(rest, launcher)
    arguments, positional = arguments_of(rest[script + 1 :])
    yield Command(
        launcher=launcher,
        options=options,
        script=rest[script].text if script < len(rest) else "",
        arguments=arguments,
        positional=positional,
        environment=statement.environment,
        line=words[first].line,
        prefix=words[:first],
    )


def _inside(command: Command, statement: Statement, prefix: Sequence[Word]) -> Command:
    return Command(
        launcher=command.launcher,
        options=command.options,
        script=command.script,
        arguments=command.arguments,
        positional=command.positional,
        environment={**statement.environment, **command.environment},
        line=command.line,
        prefix=(*prefix, *command.prefix),
    )


def _launcher(words: Sequence[Word]) -> tuple[str, int, int] | None:
    """Return a launcher's name, the index of its first word and that of its first option."""
    for at, word in enumerate(words):
        name, following = _base(word.text), [each.text for each in words[at + 1 : at + 3]]
        if name == "accelerate" and following[:1] == ["launch"]:
            return "accelerate", at, at + 2
        if name in ("accelerate-launch", "torchrun", "deepspeed", "ds"):
            return {"accelerate-launch": "accelerate", "ds": "deepspeed"}.get(name, name), at, at + 1
        if name == "trl" and following[:1] and following[0] in _TRL_METHODS:
            return "trl", at, at + 1
        if re.fullmatch(r"python(3(\.\d+)?)?", name):
            if following[:1] == ["-m"] and len(following) == 2 and following[1] in _MODULES:
                return _MODULES[following[1]], at, at + 3
            script = next((each.text for each in words[at + 1 :] if not each.text.startswith("-")), "")
            return ("python", at, at + 1) if script.endswith(".py") or following[:1] == ["-m"] else None
    return None


def _base(word: str) -> str:
    """Return the last part of a path."""
    return word.rpartition("/")[2]


def _own_options(words: Sequence[Word], launcher: str) -> tuple[tuple[Option, ...], int]:
    """Return the options before the script, and the index of the script."""
    switches = SWITCHES.get(launcher, frozenset())
    found, at = [], 0
    while at < len(words) and words[at].text.startswith("-"):
        word = words[at]
        name, equals, value = word.text.lstrip("-").partition("=")
        name = name.replace("-", "_")
        name = _SHORT.get(name, name) if not word.text.startswith("--") else name
        at += 1
        if launcher == "python":
            if name == "module":
                break  # `python -m package`: the module is the script
            continue
        if equals:
            found.append(Option(name=name, values=(value,), line=word.line, is_known=word.is_known))
        elif name in switches or at >= len(words):
            found.append(Option(name=name, values=(), line=word.line))
        else:
            found.append(Option(name=name, values=(words[at].text,), line=word.line, is_known=words[at].is_known))
            at += 1
    return tuple(found), at


def arguments_of(words: Sequence[Word]) -> tuple[tuple[Option, ...], tuple[Word, ...]]:
    found: list[Option] = []
    positional: list[Word] = []
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not word.text.startswith("-") or _NEGATIVE.match(word.text):
            positional.append(word)
            continue
        name, equals, value = word.text.lstrip("-").partition("=")
        values = [Word(text=value, line=word.line, is_known=word.is_known)] if equals else []
        while (
            not equals and at < len(words) and (not words[at].text.startswith("-") or _NEGATIVE.match(words[at].text))
        ):
            if values and words[at].text.startswith("$") and not words[at].is_known:
                break  # a variable behind a value mostly stands for more options
            values.append(words[at])
            at += 1
        found.append(
            Option(
                name=name.replace("-", "_"),
                values=tuple(each.text for each in values),
                line=word.line,
                is_known=word.is_known and all(each.is_known for each in values),
            )
        )
    return tuple(found), tuple(positional)


def _of_trl(words: Sequence[Word], statement: Statement, line: int, prefix: Sequence[Word]) -> Command:
    """Return a command of `trl`: it passes what the method does not know to `accelerate launch`."""
    arguments, positional = arguments_of(words[1:])
    return Command(
        launcher="trl",
        options=(),
        script=words[0].text,
        arguments=arguments,
        positional=positional,
        environment=statement.environment,
        line=line,
        prefix=tuple(prefix),
    )
