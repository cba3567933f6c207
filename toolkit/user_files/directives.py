"""The `#SBATCH` lines of a batch script as sbatch reads them: its options, and where it stops at one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from toolkit.config.suggestions import nearest
from toolkit.errors import Problem
from toolkit.user_files.option_values import directive_fault

# Options by whether they take a value (`man sbatch` of SLURM 22.05 and, behind them, what later releases have added), with
# the short option where there is one.
_WITH_VALUE = (
    *(
        "account A",
        "acctg-freq",
        "array a",
        "batch",
        "bb",
        "bbf",
        "begin b",
        "chdir D",
        "cluster-constraint",
        "clusters M",
    ),
    *("cluster", "comment", "constraint C", "container", "context", "core-spec S", "cores-per-socket", "cpu-freq"),
    *(
        "cpus-per-gpu",
        "cpus-per-task c",
        "deadline",
        "delay-boot",
        "dependency d",
        "distribution m",
        "error e",
        "exclude x",
    ),
    *("export", "export-file", "extra-node-info B", "gid", "gpu-bind", "gpu-freq", "gpus G", "gpus-per-node"),
    *("gpus-per-socket", "gpus-per-task", "gres", "gres-flags", "hint", "input i", "job-name J", "kill-on-invalid-dep"),
    *("licenses L", "mail-type", "mail-user", "mcs-label", "mem", "mem-bind", "mem-per-cpu", "mem-per-gpu", "mincpus"),
    *(
        "network",
        "nodefile F",
        "nodelist w",
        "nodes N",
        "ntasks n",
        "ntasks-per-core",
        "ntasks-per-gpu",
        "ntasks-per-node",
    ),
    *("ntasks-per-socket", "ntasks-per-tres", "open-mode", "output o", "partition p", "power", "prefer", "priority"),
    *("profile", "qos q", "reservation", "signal", "sockets-per-node", "switches", "tasks-per-node", "thread-spec"),
    *("threads-per-core", "time t", "time-min", "tmp", "uid", "wait-all-nodes", "wckey", "wrap"),
    *("container-id", "extra", "resources", "segment", "tres-bind", "tres-per-task"),
)
_WITHOUT_VALUE = (
    *("contiguous", "help h", "hold H", "ignore-pbs", "no-requeue", "overcommit O", "oversubscribe s", "parsable"),
    *("quiet Q", "reboot", "requeue", "spread-job", "test-only", "usage", "use-min-nodes", "verbose v", "version V"),
    *("wait W", "consolidate-segments", "spread-segments", "stepmgr"),
)
# These read a value only behind `=`, or in the same word as the short option.
_VALUE_MAY_FOLLOW = (
    *("exclusive", "get-user-env", "nice", "no-kill k", "propagate", "oom-kill-step", "resv-ports"),
)  # fmt: skip
# Pyxis, SLURM's plugin for containers, adds these (README of NVIDIA/pyxis).
_PYXIS_WITH_VALUE = ("image", "mounts", "workdir", "name", "save", "env")
_PYXIS_SWITCHES = ("mount-home", "remap-root", "entrypoint", "entrypoint-log", "writable", "readonly")

_ALIASES = {"tasks-per-node": "ntasks-per-node", "cluster": "clusters"}
# Of these a value may begin with `=`.
_FREE_TEXTS = ("chdir", "error", "input", "job-name", "output")
_SEPARATORS = ("hetjob", "packjob")


def _table() -> dict[str, str]:
    """Return for each long option whether it takes a value: `yes`, `no` or `optional`."""
    found = {name.split()[0]: "yes" for name in _WITH_VALUE}
    found |= {name.split()[0]: "no" for name in _WITHOUT_VALUE}
    found |= {name.split()[0]: "optional" for name in _VALUE_MAY_FOLLOW}
    found |= {f"container-{name}": "yes" for name in _PYXIS_WITH_VALUE}
    return found | {f"{no}container-{name}": "no" for name in _PYXIS_SWITCHES for no in ("", "no-")}


OPTIONS: Mapping[str, str] = _table()
SHORT: Mapping[str, str] = {
    letter: name for name, letter in (each.split() for each in (*_WITH_VALUE, *_WITHOUT_VALUE, *_VALUE_MAY_FOLLOW) if " " in each)
}  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Directives:
    """The directives of a batch script.

    Args:
        keys: Values by long name; empty text for a switch. Of a job of several components those of the first.
        lines: Line of each.
        ignored: Name and line of those below the first command, and of those behind a blank at the start of the line.
        problems: What sbatch stops at.
    """

    keys: dict[str, str] = field(default_factory=dict)
    lines: dict[tuple[str, ...], int] = field(default_factory=dict)
    ignored: list[tuple[str, int]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


class _RefusedError(Exception):
    """A line that sbatch stops at: what it is, what is wrong with it, and the fix."""


def read_directives(text: str, *, name: str) -> Directives:
    """Read the `#SBATCH` lines of a batch script; nothing is raised."""
    found = Directives()
    begun, is_first = False, True
    for number, row in enumerate(text.splitlines(), start=1):
        if not row.startswith("#SBATCH"):
            begun |= bool(row.strip()) and not row.lstrip().startswith("#")
            if re.match(r"\s+#SBATCH\s+-", row):
                found.ignored.append((_first_name(row), number))
            continue
        try:
            words = list(_words(row.removeprefix("#SBATCH")))
            if words and words[0] in _SEPARATORS:
                is_first = False
                continue
            for key, value in _options(words):
                if begun:
                    found.ignored.append((key, number))
                    continue
                # The last one of a name counts, and sbatch reads them all.
                unkept = [(value, number)] if not is_first else []
                if is_first and key in found.keys:
                    unkept = [(found.keys[key], found.lines[(key,)])]
                found.problems += [_fault(key, old, line, name) for old, line in unkept if directive_fault(key, old)]
                if is_first:
                    found.keys[key] = value
                    found.lines[(key,)] = number
        except _RefusedError as error:
            key, message, fix = error.args
            if begun:
                found.ignored.append((key.lstrip("-"), number))
                continue
            found.problems.append(
                Problem(
                    code="SBATCH_OPTION", key=key, message=message, fix=fix, source="sbatch", file=name, line=number
                )
            )
    return found


def _fault(key: str, value: str, line: int, name: str) -> Problem:
    message, fix, source = directive_fault(key, value) or ("", "", "")
    return Problem(
        code="SBATCH_VALUE", key=key, message=f"--{key}{message}", fix=fix, source=source, file=name, line=line
    )


def _first_name(row: str) -> str:
    """Return the name of the first option of a line that sbatch takes for a comment."""
    found = re.search(r"#SBATCH\s+--?([A-Za-z][\w-]*)", row)
    name = found[1] if found else ""
    return SHORT.get(name[:1], name) if found and "--" not in row else name


def _words(row: str) -> Iterator[str]:
    """Yield the words of a line, which quotes and backslashes hold together and an open `#` ends."""
    word, quote, has_word, at = "", "", False, 0
    while at < len(row):
        sign = row[at]
        at += 1
        if quote:
            if sign == quote:
                quote = ""
            else:
                word += sign
        elif sign in "\"'":
            quote, has_word = sign, True
        elif sign == "\\" and at < len(row):
            word, has_word, at = word + row[at], True, at + 1
        elif sign == "#":
            break
        elif sign.isspace():
            if has_word:
                yield word
            word, has_word = "", False
        else:
            word, has_word = word + sign, True
    if quote:
        message = f"a quote {quote} begins in #SBATCH{row.rstrip()} and does not end: sbatch refuses the script"
        raise _RefusedError(quote, message, f"Write {quote} where it ends")
    if has_word:
        yield word


def _options(words: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the long names and values of a line's options, as getopt_long reads them."""
    rest = list(reversed(words))
    while rest:
        word = rest.pop()
        if word.startswith("--") and len(word) > 2:
            yield _long(word, rest)
        elif word.startswith("-") and len(word) > 1 and word != "--":
            yield from _short(word, rest)
        else:
            message = f"`{word}` is no option: sbatch refuses the script"
            fix = "Write options as --name=value, a value with blanks in quotes, and a comment behind #"
            raise _RefusedError(word, message, fix)


def _long(word: str, rest: list[str]) -> tuple[str, str]:
    written, equals, value = word[2:].partition("=")
    name = _known(written)
    takes = OPTIONS[name]
    if takes == "no" and equals:
        message = f"--{written}={value} is a switch, which takes no value: sbatch refuses the script"
        raise _RefusedError(f"--{written}", message, f"Write --{name}")
    if takes == "yes" and not equals:
        value = _next_word(f"--{name}", rest)
    return _ALIASES.get(name, name), value


def _known(written: str) -> str:
    """Return the option that a name, or the beginning of only one, stands for."""
    if written in OPTIONS:
        return written
    longer = [name for name in OPTIONS if name.startswith(written)]
    if len(longer) == 1:
        return longer[0]
    if longer:
        message = f"--{written} is the beginning of {len(longer)} options: sbatch refuses the script"
        raise _RefusedError(
            f"--{written}", message, f"Write one of {', '.join(f'--{name}' for name in sorted(longer)[:8])}"
        )
    near = nearest(written.lower().replace("_", "-"), OPTIONS)
    fix = (
        f"Did you mean --{near[0]}"
        if near
        else "`sbatch --help` lists its options, and those that plugins of a cluster add"
    )
    raise _RefusedError(f"--{written}", f"--{written} is no option of sbatch, which refuses the script", fix)


def _short(word: str, rest: list[str]) -> Iterator[tuple[str, str]]:
    """Yield what a word of short options says: switches may stand together, and the last may have a value."""
    for at, letter in enumerate(word[1:], start=2):
        if letter not in SHORT:
            fix = "`sbatch --help` lists its options"
            if word[1:].partition("=")[0] in OPTIONS:
                fix = f"Write -{word}"
            raise _RefusedError(word, f"-{letter} in `{word}` is no option of sbatch, which refuses the script", fix)
        name, value = SHORT[letter], word[at:]
        if OPTIONS[name] == "no":
            yield name, ""
            continue
        if OPTIONS[name] == "yes" and not value:
            value = _next_word(f"-{letter}", rest)
        if value.startswith("=") and name not in _FREE_TEXTS:
            message = (
                f"-{letter}{value} has a value that begins with `=`, which SLURM refuses: a short option takes none"
            )
            raise _RefusedError(word, message, f"Write --{name}{value}, or -{letter} {value[1:]}")
        yield name, value
        return


def _next_word(option: str, rest: list[str]) -> str:
    if not rest:
        raise _RefusedError(option, f"{option} has no value: sbatch refuses the script", f"Write {option} VALUE")
    return rest.pop()
