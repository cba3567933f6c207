"""Strict loader of job files: duplicate keys, unknown names and wrong types are errors with a fix."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from ruamel.yaml.error import YAMLError

from toolkit.arguments import checks_arguments, shown
from toolkit.config.accelerate_file import refuse_accelerate_file
from toolkit.config.job import Job
from toolkit.config.key_lines import with_lines
from toolkit.config.schema import names_of, own_key, section_below, section_of, wants_number
from toolkit.config.section import Section
from toolkit.config.yaml_text import load_yaml, parse_value
from toolkit.errors import SpecError

# "8" in quotes where a number is expected: the user means a number.
_NUMBER = re.compile(r"^[+-]?(\d+(_\d+)*(\.\d*)?|\.\d+)([eE][+-]?\d+)?$", re.ASCII)


@checks_arguments
def load_job(path: str | Path, *, overrides: Sequence[str] = ()) -> Job:
    """Read a job file and apply `--set` overrides; relative paths stay relative to the working directory.

    Raises:
        SpecError: With every unreadable, unknown, duplicate or mistyped key.
    """
    path = Path(path)
    document = load_document(path, overrides)
    try:
        return parse_job(document)
    except SpecError as error:
        raise SpecError(*with_lines(error.problems, path, overrides)) from None


def load_document(path: Path, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """Read the YAML of a job file and apply overrides; its keys are not checked yet.

    Raises:
        SpecError: As in `load_yaml`; ACCELERATE_FILE if it is a configuration of Accelerate; SET_SYNTAX.
    """
    document = load_yaml(path)
    refuse_accelerate_file(document, name=str(path))
    for override in overrides:
        apply_override(document, override)
    return document


# Sections that may be given as a name alone.
_NAMED = ("model", "cluster.gpu")
_MAX_DEPTH = 32  # levels of a dotted key; DeepSpeed's deepest has five


def apply_override(document: dict[str, Any], override: str) -> None:
    """Change one value in place: `train.sequence_length=8192`; the value is YAML.

    Raises:
        SpecError: SET_SYNTAX when it is not key=value, or the key leads through a value that is not a section.
    """
    key, separator, text = override.partition("=")
    key = key.strip()
    if not separator:
        raise _bad_key(override, f"--set {override!r}")
    node, leaf, _ = _place(document, key, Job, given=f"--set {override}")
    try:
        node[leaf] = parse_value(text, name=f"--set {key}")
    except YAMLError:
        node[leaf] = text
    except SpecError as error:  # its line is not one of the file
        raise SpecError(*(replace(problem, line=None) for problem in error.problems)) from None


def change_job(job: Job, changes: Iterable[str | Mapping[str, Any]]) -> Job:
    """Return a changed job, as documented for `Job.with_`."""
    document = job.written()
    for change in changes:
        if isinstance(change, str):
            apply_override(document, change)
        else:
            _apply_values(document, change, Job)
    return parse_job(document)


def _apply_values(
    document: dict[str, Any], values: Mapping[str, Any], section: type[BaseModel] | None, *, depth: int = 0
) -> None:
    given: set[str] = set()
    for key, value in values.items():
        if depth > _MAX_DEPTH:
            raise _bad_key(str(key), f"a value of {depth} levels")
        own = own_key(str(key), section)
        # Two names of one key in one mapping are both kept, and reported as in a job file.
        node, leaf, within = _place(document, key, section, given=f"{key}={shown(value)}", renames=own not in given)
        given.add(own)
        if value is None:
            node.pop(leaf, None)
        elif isinstance(value, Mapping):
            inside = node.setdefault(leaf, {})
            if not isinstance(inside, dict):
                inside = node[leaf] = {"name": inside} if own_key(key) in _NAMED else {}
            _apply_values(inside, value, section_below(within, leaf), depth=depth + 1)
        else:
            node[leaf] = value


def _place(
    document: dict[str, Any], key: str, section: type[BaseModel] | None, *, given: str, renames: bool = True
) -> tuple[dict[str, Any], str, type[BaseModel] | None]:
    """Return the mapping of a dotted key, created if absent, the key's last component, and the class of its section.

    A value under another name of the same key is renamed to the given name, so that a change replaces it.
    """
    if not isinstance(key, str) or not all(key.split(".")) or key.count(".") > _MAX_DEPTH:
        raise _bad_key(str(key), given)
    *parents, leaf = key.split(".")
    node = document
    for depth, parent in enumerate(parents):
        _rename(node, parent, section)
        if node.get(parent) is None:
            node[parent] = {}
        child = node[parent]
        path = ".".join(parents[: depth + 1])
        if own_key(path) in _NAMED and isinstance(child, str):
            child = node[parent] = {"name": child}
        if not isinstance(child, dict):
            raise SpecError.of(
                code="SET_SYNTAX",
                key=key,
                message=f"{given}: {path} is {child!r}, not a section",
                fix=f"Set {path} itself",
            )
        node = child
        section = section_below(section, parent)
    if renames:
        _rename(node, leaf, section)
    return node, leaf, section


def _rename(node: dict[str, Any], name: str, section: type[BaseModel] | None) -> None:
    names = names_of(section)
    if name not in names:
        return
    for other in [other for other in node if other != name and names.get(other) == names[name]]:
        value = node.pop(other)
        node.setdefault(name, value)


def _bad_key(key: str, given: str) -> SpecError:
    return SpecError.of(
        code="SET_SYNTAX",
        key=key[:200],
        message=f"{given:.200} is not key=value, or part of its key is empty, or the key has more parts than "
        f"{_MAX_DEPTH}",
        fix="Write --set train.sequence_length=8192; in Python with_({'train.sequence_length': 8192})",
    )


def parse_job(document: Mapping[str, Any]) -> Job:
    """Build a Job from a mapping.

    Raises:
        SpecError: With one problem for each unknown, missing or mistyped key.
    """
    return Job.model_validate(_numbers_from_strings(dict(document), Job))


def _numbers_from_strings(value: Any, annotation: Any) -> Any:
    """Turn "1e-4" and "8" into numbers where the schema expects a number; leave all else unchanged."""
    if isinstance(value, Section) and type(value) is section_of(annotation):
        value = value.written()
    if isinstance(value, dict):
        section = section_of(annotation)
        if section is None:
            return value
        fields, names = section.model_fields, names_of(section)
        return {
            key: _numbers_from_strings(item, fields[names[key]].annotation if key in names else None)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple) and section_of(annotation) is not None:
        return [_numbers_from_strings(item, section_of(annotation)) for item in value]
    if isinstance(value, str) and wants_number(annotation) and _NUMBER.match(text := value.strip()):
        number = float(text)  # exact for every integer that a key allows
        return int(number) if number.is_integer() else number
    return value
