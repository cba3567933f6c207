"""pydantic's validation errors of a job, in terms of the job file."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ValidationError

from toolkit.arguments import shown
from toolkit.config.job import NAME_TAG, SECTION_TAG, SETS_TAG, Job
from toolkit.config.other_names import OTHER_NAMES, REFUSED_NAMES
from toolkit.config.schema import known_keys, own_key, path_of, section_below
from toolkit.config.suggestions import nearest_key
from toolkit.errors import Problem

# pydantic's names of types, in the terms of YAML.
_FORMS = {
    "tuple_type": "input should be a list, such as [a, b]",
    "too_short": "give at least one",
    "path_type": "input should be a path",
}


# Problems that are worked out of one job: a search for what each key was meant to be takes a millisecond.
_MOST_SHOWN = 100


def problems_of(error: ValidationError, kind: type[BaseModel] = Job, given: Any = None) -> list[Problem]:
    """Return one problem for each key, although pydantic reports each member of a union and each item of a list.

    Args:
        error: Error of a job, or of a section that was built on its own.
        kind: Class of that job or section.
        given: Input that was validated.
    """
    place = path_of(kind)
    details: dict[str, list[Any]] = {}
    for detail in error.errors(include_url=False):
        value = detail["input"]
        # A list whose items are invalid also counts as empty; an array has a length, but no truth value.
        if detail["type"] == "too_short" and isinstance(value, Sized) and len(value):
            continue
        details.setdefault(_key((*place, *detail["loc"])), []).append(detail)
    problems: list[Problem] = []
    shown_keys, more = list(details)[:_MOST_SHOWN], len(details) - _MOST_SHOWN
    for key in shown_keys:
        found = details[key]
        if twins := _twins(key, found[0], given):
            problems.append(twins)
            continue
        # The union member whose type fits reports what is wrong with the value; type errors of the others are irrelevant.
        exact = [detail for detail in found if detail["type"] in ("value_error", "too_short")]
        first, *others = (_problem(key, detail) for detail in exact or found)
        fixes = dict.fromkeys([first.fix, *(f"{other.fix[0].lower()}{other.fix[1:]}" for other in others)])
        distinct = [fix for fix in fixes if fix is first.fix or fix.lower() != first.fix.lower()]
        problems.append(replace(first, fix=", or ".join(distinct)))
    if more > 0:
        fix = "Correct the keys above first"
        problems.append(Problem(code="KEY_VALUE", message=f"{more:,} more keys are unknown or not valid", fix=fix))
    return problems


def _problem(key: str, detail: Any) -> Problem:
    if detail["type"] == "extra_forbidden":
        return _unknown_key(key, detail["input"])
    if detail["type"] == "missing":
        planned = ", or let `toolkit plan JOB --write FILE` choose one" if key == "cluster" else ""
        return Problem(code="KEY_MISSING", key=key, message=f"{key} is missing", fix=f"Add {key}{planned}")
    if detail["type"] == "frozen_instance":
        return Problem(
            code="JOB_FROZEN",
            key=key,
            message=f"{key} cannot be set: a job is immutable",
            fix=f'Make a changed copy: job.with_({{"{key}": ...}})',
        )
    message = _FORMS.get(detail["type"], detail["msg"].removeprefix("Value error, "))
    if own_key(key) == "model":
        message = "write the model's name, or a section with model.name"
    elif key == "cluster.gpu":
        message = "write the name of a card, or a section that describes one with name and memory_gib"
    elif detail["type"] in ("model_type", "dict_type"):
        message = f"write {key or 'it'} as a section: its keys indented below it, in Python its own class or a dict"
    given = detail["input"]
    return Problem(
        code="KEY_VALUE",
        key=key,
        message=f"{key or 'the job'}={_shown(given)} ({type(given).__name__}) is not valid",
        fix=message[0].upper() + message[1:],
    )


def _key(location: tuple[int | str, ...]) -> str:
    """Return the dotted path of a pydantic location, without trailing union members and item numbers."""
    if SETS_TAG in location:  # data.eval, the name of a set, and a key of its section
        at = location.index(SETS_TAG)
        return ".".join(str(part) for part in (*location[:at], *location[at + 1 : at + 3]) if part != "[key]")
    section: type[BaseModel] | None = Job
    parts: list[str] = []
    for part in location:
        if part == NAME_TAG:  # what follows is a member of a union
            break
        if part == SECTION_TAG:
            continue
        if isinstance(part, int) and parts:  # an item of a list of sections
            parts[-1] += f"[{part}]"
            continue
        parts.append(str(part))
        section = section_below(section, str(part))
        if section is None:
            break
    return ".".join(parts)


def _twins(key: str, detail: Any, given: Any) -> Problem | None:
    """Return the problem that one key is given under two names: pydantic reads one and reports the other as unknown."""
    section, _, leaf = key.rpartition(".")
    own = own_key(key)
    name = own.rpartition(".")[2]
    if detail["type"] != "extra_forbidden" or name == leaf:
        return None
    for part in detail["loc"][:-1]:
        given = given if part in (NAME_TAG, SECTION_TAG, SETS_TAG) else given[part]
    read = next((each for each in (name, *OTHER_NAMES[name]) if each in given and each != leaf), None)
    if read is None:
        return None
    other = f"{section}.{read}" if section else read
    return Problem(
        code="KEY_OTHER_TOOL",
        key=key,
        message=f"{key}={_shown(detail['input'])} and {other}={_shown(given[read])} are two names of one key",
        fix=f"Keep one of the two; here it is {own}",
    )


def _shown(value: Any) -> str:
    return "a section" if isinstance(value, dict) else shown(value)


def _unknown_key(key: str, value: Any) -> Problem:
    leaf = key.rpartition(".")[2]
    known = list(known_keys())
    if ours := _ours(leaf, known):
        return Problem(
            code="KEY_OTHER_TOOL",
            key=key,
            message=f"{key}={_shown(value)} is another tool's name",
            fix=f"Here it is {ours}",
        )
    near = [path for path in known if path.rpartition(".")[2] == leaf] or nearest_key(key, known, n=2)
    fix = f"Did you mean {' or '.join(near)}" if near else "Remove it; `toolkit validate --keys` lists all keys"
    return Problem(code="KEY_UNKNOWN", key=key, message=f"{key} is not a key of a job", fix=fix)


def _ours(name: str, known: list[str]) -> str | None:
    """Return what to write in place of another tool's name that is not read at its position."""
    own = next((own for own, others in OTHER_NAMES.items() if name in others), None)
    if own is None:
        return REFUSED_NAMES.get(name)
    return next(path for path in known if path.rpartition(".")[2] == own)
