"""The line of a job file on which the key of a problem stands."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from toolkit.config.schema import known_keys, own_key
from toolkit.config.yaml_text import line_numbers, read_named
from toolkit.errors import Problem, SpecError

_ITEM = re.compile(r"\[\d+\]")  # item of a list
_MAX_KEY_CHARACTERS = 300  # of a path: a key of a job has 50


def with_lines(problems: Iterable[Problem], path: Path, overrides: Sequence[str] = ()) -> tuple[Problem, ...]:
    """Return problems with the line of a job file that each is about: that of its key, or of its section if it lacks the key.

    Args:
        problems: Problems of the job.
        path: Its file; a file without keys leaves the problems unchanged.
        overrides: `--set` overrides of the job; the keys that they set have no line.
    """
    try:
        keys = line_numbers(read_named(path, kind="YAML")) if path.is_file() else {}
    except (SpecError, OSError, ValueError):
        keys = {}
    lines = {
        own_key(".".join(key).replace(".[", "[")): line
        for key, line in keys.items()
        if sum(map(len, key)) <= _MAX_KEY_CHARACTERS
    }
    known = frozenset(known_keys())
    changed = [own_key(override.partition("=")[0].strip()) for override in overrides]
    return tuple(_with_line(problem, path, lines, known, changed) for problem in problems)


def _with_line(
    problem: Problem, path: Path, lines: dict[str, int], known: frozenset[str], changed: Sequence[str]
) -> Problem:
    key = own_key(problem.key)
    if problem.line is not None or any(key == name or key.startswith(f"{name}.") for name in changed):
        return problem
    places = [key]
    while (
        _ITEM.sub("", key) in known and "." in places[-1]
    ):  # others are not the job's if the file lacks them: names of files
        places.append(places[-1].rpartition(".")[0])
    line = next((lines[place] for place in places if place in lines), None)
    return problem if line is None else replace(problem, file=str(path), line=line)
