"""Strict YAML: duplicate keys, exploding aliases and files that are not a mapping are errors with a fix."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from toolkit.config.paths import shown
from toolkit.config.suggestions import nearest
from toolkit.errors import SpecError
from toolkit.io import read_text

# Largest file, in bytes: a thousand times the size of jobs and configurations; also bounds reads of /dev/zero.
_MAX_FILE_BYTES = 2**20
# Most values of a document with its aliases expanded: a few lines of nested aliases can stand for billions.
_MAX_VALUES = 100_000

# YAML 1.1 without its numbers of base 8 (010 is 8) and base 60 (1:30 is 90), which are never meant, and with the 5e8
# and 1e-4 of YAML 1.2.
_NUMBER_FORMS = {
    "tag:yaml.org,2002:int": r"[-+]?(?:0b[0-1_]+|0x[0-9a-fA-F_]+|0|[1-9][0-9_]*)$",
    "tag:yaml.org,2002:float": r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?$"
    r"|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$",
}


# What a scalar of a tag must be, and how to write it, for errors.
_FORMS = {
    "int": ("a whole number", "Write digits, at most 4300, or put quotes around a text"),
    "float": ("a number", "Write a number such as 1.0e-5, or put quotes around a text"),
    "bool": ("true or false", "Write true or false, or put quotes around a text"),
    "timestamp": ("a date", "Write a date of the calendar, or put quotes around a text"),
    "str": ("Unicode text", r'Write the character itself, or its whole code such as "\U0001F600"'),
}


class _ValueError(yaml.YAMLError):
    """Raised for a scalar that is not what its tag or its form says.

    Args:
        node: The scalar.
        reason: Message of the function that converts it.
    """

    def __init__(self, node: yaml.ScalarNode, reason: str) -> None:
        super().__init__(reason)
        self.node = node
        self.reason = reason


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a mapping with duplicate keys, and reads numbers as users mean them."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own name and form
        first: [(tag, re.compile(_NUMBER_FORMS[tag]) if tag in _NUMBER_FORMS else form) for tag, form in forms]
        for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep=deep)
            if isinstance(value, str):
                value.encode()  # escapes can spell halves of surrogate pairs
        except UnicodeEncodeError:
            raise _ValueError(node, "it holds half of a surrogate pair") from None
        except (ArithmeticError, ValueError, LookupError, AttributeError, TypeError) as error:
            # SafeLoader lets the errors of int(), datetime() and its table of booleans through.
            if not isinstance(node, yaml.ScalarNode):
                raise
            raise _ValueError(node, str(error).partition(";")[0]) from None
        return value

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Checked here and not in construction, when `<<` may have copied the keys of another mapping into this one.
        node = super().compose_mapping_node(anchor)
        seen: dict[str, int] = {}
        for key_node, _ in node.value:
            line = key_node.start_mark.line + 1
            kind = key_node.tag.rpartition(":")[2]
            if not isinstance(key_node, yaml.ScalarNode) or kind not in ("str", "merge"):
                shown = key_node.value if isinstance(key_node, yaml.ScalarNode) else "of several parts"
                raise SpecError.of(
                    code="YAML_KEY",
                    message=f"{self.name}, line {line}: key {shown} is a {kind}, not a word",
                    fix="Write keys as plain words, in quotes where YAML reads them as something else",
                )
            key = key_node.value
            if key in seen:
                raise SpecError.of(
                    code="YAML_DUPLICATE",
                    key=key,
                    message=f"{self.name}, line {line}: {key} appears twice, first on line {seen[key]}",
                    fix="Keep one of the two",
                )
            seen[key] = line
        return node


def load_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file whose top level is a mapping.

    Raises:
        SpecError: FILE_NOT_FOUND, FILE_UNREADABLE, YAML_SYNTAX, YAML_KEY, YAML_DUPLICATE, YAML_RECURSIVE or
            YAML_NOT_MAPPING.
    """
    return parse_yaml(read_named(path, kind="a job file: YAML"), name=str(path))


def read_named(path: Path, *, kind: str) -> str:
    """Read a text file that the user named.

    Args:
        path: Path of the file.
        kind: Kind of file that is expected, for the error.

    Raises:
        SpecError: FILE_NOT_FOUND, FILE_UNREADABLE.
    """
    try:
        return read_text(path, max_bytes=_MAX_FILE_BYTES)
    except FileNotFoundError:
        near = nearest(path.name, _siblings(path))
        fix = f"Did you mean {path.parent / near[0]}" if near else "Check the path"
        raise SpecError.of(code="FILE_NOT_FOUND", key=str(path), message=f"{path} does not exist", fix=fix) from None
    except (OSError, ValueError) as error:  # ValueError: bytes that are not UTF-8, a path with a zero byte
        raise SpecError.of(
            code="FILE_UNREADABLE",
            key=str(path),
            message=f"{path} cannot be read: {getattr(error, 'strerror', None) or error}",
            fix=f"Name {kind} text in UTF-8",
        ) from None


def parse_yaml(text: str, *, name: str) -> dict[str, Any]:
    """Parse YAML text whose top level is a mapping; `name` names it in errors.

    Raises:
        SpecError: YAML_SYNTAX, YAML_KEY, YAML_DUPLICATE, YAML_RECURSIVE, YAML_NOT_MAPPING.
    """
    try:
        value = parse_value(text, name=name)
    except _ValueError as error:
        raise _wrong_value(error, text, name=name) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{name}, line {mark.line + 1}" if mark else name
        problem = " ".join((getattr(error, "problem", None) or str(error)).split())
        if problem == "but found another document":
            problem = "a second document begins, and a job is one"
        raise SpecError.of(
            code="YAML_SYNTAX", key=name, message=f"{where}: {problem}", fix="Fix the YAML there"
        ) from None
    if not isinstance(value, dict):
        kind = "nothing" if value is None else f"a {type(value).__name__}"
        raise SpecError.of(
            code="YAML_NOT_MAPPING",
            key=name,
            message=f"{name} holds {kind}, not a mapping",
            fix="Start with `model:`, `cluster:` and `train:`",
        )
    return value


def parse_value(text: str, *, name: str) -> Any:
    """Parse any YAML value; every failure is a YAMLError or a SpecError."""
    try:
        loader = _StrictLoader(text)
        loader.name = name
        try:
            node = loader.get_single_node()
            if node is not None and _count_values(node, {}, name=name) > _MAX_VALUES:
                raise _recursive(
                    name, f"its aliases stand for more than {_MAX_VALUES:,} values", "Write out what the job needs"
                )
            value = None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
        # Values must be writable: not nested too deeply, and without the lone surrogates that escapes can spell.
        json.dumps(value, default=str, ensure_ascii=False).encode()
    except (ArithmeticError, ValueError, LookupError, AttributeError, TypeError) as error:
        # SafeLoader lets the errors of chr() through.
        raise yaml.YAMLError(f"a value is not what its tag or its form says: {error}") from None
    except RecursionError:
        raise _recursive(name, "sections are nested too deep", "Remove levels: a job has four at most") from None
    return value


def _wrong_value(error: _ValueError, text: str, *, name: str) -> SpecError:
    """Return the error of a scalar that is not what its tag or its form says, with its key and line."""
    mark, tag = error.node.start_mark, error.node.tag.rpartition(":")[2]
    path = _path_of(mark.index, yaml.compose(text, Loader=yaml.SafeLoader))
    rule, fix = _FORMS.get(tag, (f"of its tag {tag}", "Correct it, or put quotes around a text"))
    value = error.node.value.encode("utf-8", "backslashreplace").decode()
    return SpecError.of(
        code="YAML_SYNTAX",
        key=path or name,
        message=f"{name}, line {mark.line + 1}: {path}{'=' if path else ''}{shown(value)} is not {rule}: {error.reason}",
        fix=fix,
    )


def _path_of(index: int, node: yaml.Node | None) -> str:
    """Return the key path of the scalar that begins at a character of the text; empty for the document itself."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.start_mark.index == index:
                return str(key.value)
            if value.start_mark.index <= index < value.end_mark.index:
                below = _path_of(index, value)
                return f"{key.value}{'' if below.startswith('[') or not below else '.'}{below}"
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            if value.start_mark.index <= index < value.end_mark.index:
                below = _path_of(index, value)
                return f"[{number}]{'' if below.startswith('[') or not below else '.'}{below}"
    return ""


def _count_values(node: yaml.Node, counted: dict[int, int], *, name: str) -> int:
    """Count the values below a node with aliases expanded; `counted` caches the count of each node."""
    key = id(node)
    if (known := counted.get(key)) is not None:
        if not known:
            raise _recursive(name, "an anchor stands inside itself", "Write the value out in place of the alias")
        return known
    if isinstance(node, yaml.ScalarNode):
        return 1
    counted[key] = 0  # marks a node being counted: meeting it again means a cycle
    parts = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
    counted[key] = 1 + sum(_count_values(part, counted, name=name) for part in parts)
    return counted[key]


def _recursive(name: str, what: str, fix: str) -> SpecError:
    return SpecError.of(code="YAML_RECURSIVE", key=name, message=f"{name}: {what}", fix=fix)


def _siblings(path: Path) -> list[str]:
    try:
        return [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return []
