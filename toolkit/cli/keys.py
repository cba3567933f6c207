"""The keys of a job file, each with its values, default and meaning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from toolkit.config.job import Job
from toolkit.config.schema import meaning_of, members_of, section_of

_WORDS = {bool: "true, false", int: "whole number", float: "number", str: "text", dict: "section"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A key of a job file.

    Args:
        path: Key path, such as `train.max_steps`.
        values: Accepted values, in words.
        default: Default as YAML; empty if it depends on the rest of the job, or means unset; or `required`.
        meaning: Description of the field in the schema.
    """

    path: str
    values: str
    default: str
    meaning: str


def describe_keys(section: type[BaseModel] = Job, prefix: str = "") -> Iterator[Key]:
    """Yield every key, in the order of the sections."""
    for name, field in section.model_fields.items():
        inner = section_of(field.annotation)
        yield Key(
            path=f"{prefix}{name}",
            values=_values(field.annotation),
            default="required" if field.is_required() else "" if inner else _shown(field.get_default()),
            meaning=meaning_of(field).replace("`", ""),
        )
        if inner is not None:
            yield from describe_keys(inner, f"{prefix}{name}.")


def _values(annotation: Any) -> str:
    words = dict.fromkeys(_word(member) for member in members_of(annotation) if member is not NoneType)
    return " or ".join(words)


def _word(member: Any) -> str:
    origin = get_origin(member)
    if isinstance(member, type) and issubclass(member, BaseModel):
        return "section"
    if origin is Literal:
        return ", ".join(map(str, get_args(member)))
    if origin is tuple:
        return f"list of {_values(get_args(member)[0])}"
    if origin is dict and get_args(member)[1] is not Any:
        return f"names, each with a {_values(get_args(member)[1])}"
    return _WORDS.get(origin or member, getattr(member, "__name__", str(member)).lower())


def _shown(default: Any) -> str:
    if default is None or default is PydanticUndefined or default == {}:
        return ""
    if isinstance(default, bool):
        return str(default).lower()
    return "[]" if default == () else str(default)
