"""The keys in the schema of a job: their paths, and the type of value of each."""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from toolkit.config.job import Job
from toolkit.config.other_names import OTHER_NAMES


def known_keys(section: type[BaseModel] = Job, prefix: str = "") -> tuple[str, ...]:
    """Return the dotted path of every key that a job file may have."""
    paths: list[str] = []
    for name, field in section.model_fields.items():
        path = f"{prefix}{name}"
        inner = section_of(field.annotation)
        paths.append(path)
        if inner is not None:
            paths.extend(known_keys(inner, f"{path}."))
    return tuple(paths)


def path_of(section: type[BaseModel], within: type[BaseModel] = Job) -> tuple[str, ...]:
    """Return the keys that lead to a section: ("train", "lora") for `Lora`, () for the job itself."""
    for name, field in within.model_fields.items():
        inner = section_of(field.annotation)
        if inner is section:
            return (name,)
        if inner is not None and (below := path_of(section, inner)):
            return (name, *below)
    return ()


def names_of(section: type[BaseModel] | None) -> dict[str, str]:
    """Return every name that a section reads, mapped to the field's own name; empty if there is no section."""
    fields = {} if section is None else section.model_fields
    return {name: field for field in fields for name in (field, *OTHER_NAMES.get(field, ()))}


def own_key(path: str, section: type[BaseModel] | None = Job) -> str:
    """Return a dotted path with other tools' names replaced by the fields' own; unknown names are kept."""
    parts: list[str] = []
    for part in path.split("."):
        parts.append(names_of(section).get(part, part))
        section = section_below(section, part)
    return ".".join(parts)


def section_below(section: type[BaseModel] | None, name: str) -> type[BaseModel] | None:
    """Return the class of a subsection by its name; None if the key has a plain value, or does not exist."""
    own = names_of(section).get(name)
    return None if section is None or own is None else section_of(section.model_fields[own].annotation)


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the section class in a field's annotation, also of a list of sections; None if the field has a plain value."""
    for member in members_of(annotation):
        if get_origin(member) is tuple:
            member = get_args(member)[0]
        if isinstance(member, type) and issubclass(member, BaseModel):
            return member
    return None


def meaning_of(field: FieldInfo) -> str:
    """Return the description of a field, which is the docstring below it, on one line."""
    return " ".join((field.description or "").split())


def wants_number(annotation: Any) -> bool:
    """Return whether a field of this annotation accepts numbers but no text."""
    members = [member for member in members_of(annotation) if member is not NoneType]
    return any(member in (int, float) for member in members) and str not in members


def members_of(annotation: Any) -> tuple[Any, ...]:
    """Return the types in a field's annotation: the members of a union, without validators."""
    if get_origin(annotation) in (Union, UnionType):
        return tuple(inner for member in get_args(annotation) for inner in members_of(member))
    if hasattr(annotation, "__metadata__"):
        return members_of(get_args(annotation)[0])
    return (annotation,)
