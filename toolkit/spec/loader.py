"""Reads a job file strictly: duplicate keys, foreign names and numbers written as strings are errors with a fix."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from toolkit.errors import SpecError
from toolkit.spec.job import Job
from toolkit.spec.job_problems import job_problems
from toolkit.spec.schema import section_of, wants_number
from toolkit.spec.yaml_text import load_yaml, parse_value

# "8" in quotes where a number is asked for; what a person means is a number.
_NUMBER = re.compile(r"^[+-]?(\d+(_\d+)*(\.\d*)?|\.\d+)([eE][+-]?\d+)?$", re.ASCII)


def load_job(path: Path, *, overrides: tuple[str, ...] = ()) -> Job:
    """Reads a job file and applies `--set` overrides; relative paths stay relative to the working directory."""
    document = load_yaml(path)
    for override in overrides:
        apply_override(document, override)
    return parse_job(document)


def apply_override(document: dict[str, Any], override: str) -> None:
    """Changes one value in place: `train.sequence_length=8192`; the value is YAML.

    Raises:
        SpecError: SET_SYNTAX when it is not key=value, or the key leads through a value that is not a section.
    """
    key, separator, text = override.partition("=")
    key = key.strip()
    if not separator or not all(key.split(".")):
        raise SpecError.of(
            code="SET_SYNTAX",
            key=override,
            message=f"--set {override!r} is not key=value, or a word of its key is empty",
            fix="Write --set train.sequence_length=8192",
        )
    *parents, leaf = key.split(".")
    node = document
    for depth, parent in enumerate(parents):
        if node.get(parent) is None:
            node[parent] = {}
        child = node[parent]
        if depth == 0 and parent == "model" and isinstance(child, str):
            child = node["model"] = {"name": child}
        if not isinstance(child, dict):
            path = ".".join(parents[: depth + 1])
            raise SpecError.of(
                code="SET_SYNTAX",
                key=key,
                message=f"--set {override}: {path} is {child!r}, not a section",
                fix=f"Set {path} itself",
            )
        node = child
    try:
        value = parse_value(text, name=f"--set {key}")
    except yaml.YAMLError:
        value = text
    node[leaf] = value


def parse_job(document: Mapping[str, Any]) -> Job:
    """Builds a Job from a mapping.

    Raises:
        SpecError: With one problem for each unknown, missing or mistyped key.
    """
    try:
        return Job.model_validate(_numbers_from_strings(dict(document), Job))
    except ValidationError as error:
        raise SpecError(*job_problems(error)) from None


def _numbers_from_strings(value: Any, annotation: Any) -> Any:
    """Turns "1e-4" and "8" into numbers where the schema asks for a number; leaves all else as it is."""
    if isinstance(value, dict):
        section = section_of(annotation)
        if section is None:
            return value
        fields = section.model_fields
        return {
            key: _numbers_from_strings(item, fields[key].annotation if key in fields else None)
            for key, item in value.items()
        }
    if isinstance(value, str) and wants_number(annotation) and _NUMBER.match(text := value.strip()):
        number = float(text)  # exact for every whole number that a key allows
        return int(number) if number.is_integer() else number
    return value
