"""Strict YAML: duplicate keys, exploding aliases and files that are not a mapping are errors with a fix."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.composer import MaxDepthExceededError
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from toolkit.config.paths import shown
from toolkit.config.suggestions import nearest
from toolkit.errors import SpecError
from toolkit.io import read_text

# Largest file, in bytes: a thousand times the size of jobs and configurations; also bounds reads of /dev/zero.
_MAX_FILE_BYTES = 2**20
# Most values of a document with its aliases expanded: a few lines of nested aliases can stand for billions.
_MAX_VALUES = 100_000
# Most levels of a document; DeepSpeed's deepest key has five.
_MAX_DEPTH = 100

# What a scalar of a tag must be, and how to write it, for errors.
_FORMS = {
    "int": ("a whole number", "Write digits, at most 4300, or put quotes around a text"),
    "float": ("a number", "Write a number such as 1.0e-5, or put quotes around a text"),
    "bool": ("true or false", "Write true or false, or put quotes around a text"),
    "timestamp": ("a date", "Write a valid date, or put quotes around a text"),
    "str": ("Unicode text", r'Write the character itself, or its full code such as "\U0001F600"'),
}


class _ValueError(YAMLError):
    """Raised for a scalar that is not what its tag or its form says.

    Args:
        node: The scalar.
        reason: Message of the function that converts it.
    """

    def __init__(self, node: ScalarNode, reason: str) -> None:
        super().__init__(reason)
        self.node = node
        self.reason = reason
        self.path = ""  # of its key, once the document is known


class _Constructor(SafeConstructor):
    """SafeConstructor whose every error about a scalar names it."""

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep=deep)
            if isinstance(value, str):
                value.encode()  # escapes can spell halves of surrogate pairs
        except UnicodeEncodeError:
            raise _ValueError(node, "it has half of a surrogate pair") from None
        except (ArithmeticError, ValueError, LookupError, AttributeError, TypeError) as error:
            # SafeConstructor lets the errors of int(), datetime() and its table of booleans through.
            if not isinstance(node, ScalarNode):
                raise
            raise _ValueError(node, str(error).partition(";")[0]) from None
        return value


def _reader() -> YAML:
    """Return a reader of YAML 1.2, in which 010 is 10 and 1:30 a text, with the yes, no, on and off of YAML 1.1."""
    reader = YAML(typ="safe", pure=True)
    reader.Constructor = _Constructor
    reader.max_depth = _MAX_DEPTH
    reader.composer.warn_double_anchors = False
    assert reader.resolver.versioned_resolver  # it loads its rules on first use, and only if it has none
    words = re.compile(r"(?:yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF)$")
    reader.resolver.add_version_implicit_resolver((1, 2), "tag:yaml.org,2002:bool", words, list("yYnNoO"))
    return reader


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
        raise _wrong_value(error, name=name) from None
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else None
        problem = " ".join((getattr(error, "problem", None) or str(error)).split())
        if problem == "but found another document":
            problem = "a second document begins, and a job is a single one"
        raise SpecError.of(
            code="YAML_SYNTAX",
            key=name,
            message=f"{_place(name, line)}: {problem}",
            fix="Fix the YAML at that line",
            line=line,
        ) from None
    if not isinstance(value, dict):
        kind = "nothing" if value is None else f"a {type(value).__name__}"
        raise SpecError.of(
            code="YAML_NOT_MAPPING",
            key=name,
            message=f"{name} is {kind}, not a mapping",
            fix="Start with `model:`, `cluster:` and `train:`",
        )
    return value


def parse_value(text: str, *, name: str) -> Any:
    """Parse any YAML value; every failure is a YAMLError or a SpecError."""
    reader = _reader()
    try:
        node = _composed(reader, text, name=name)
        value = None if node is None else reader.constructor.construct_document(node)
        # Values must be writable: without the lone surrogates that escapes can spell.
        json.dumps(value, default=str, ensure_ascii=False).encode()
    except _ValueError as error:
        found = next(path for path, value in _walk(node) if value is error.node)
        error.path = ".".join(found).replace(".[", "[")
        raise
    except (ArithmeticError, ValueError, LookupError, AttributeError, TypeError) as error:
        # The scanner lets the errors of chr() through.
        raise YAMLError(f"a value does not match its tag or form: {error}") from None
    return value


def line_numbers(text: str) -> dict[tuple[str, ...], int]:
    """Return the line of each key of a YAML text, by its path; none unless the text is a valid mapping."""
    try:
        node = _composed(_reader(), text, name="")
    except (SpecError, YAMLError, ArithmeticError, ValueError, LookupError, AttributeError, TypeError):
        return {}
    return {path: found.start_mark.line + 1 for path, found in _walk(node) if path}


def _composed(reader: YAML, text: str, *, name: str) -> Node | None:
    """Return the checked node of a text: words as keys, each once in its mapping, and not too many values."""
    try:
        node: Node | None = reader.compose(text)
    except MaxDepthExceededError:
        raise _recursive(name, "sections are nested too deep", "Remove levels: a job has at most four") from None
    if node is not None and _count_values(node, {}, name=name) > _MAX_VALUES:
        raise _recursive(
            name, f"its aliases expand to more than {_MAX_VALUES:,} values", "Write out what the job needs"
        )
    return node


def _wrong_value(error: _ValueError, *, name: str) -> SpecError:
    """Return the error of a scalar that is not what its tag or its form says, with its key and line."""
    line, tag = error.node.start_mark.line + 1, str(error.node.tag).rpartition(":")[2]
    rule, fix = _FORMS.get(tag, (f"of its tag {tag}", "Correct it, or put quotes around a text"))
    value = error.node.value.encode("utf-8", "backslashreplace").decode()
    return SpecError.of(
        code="YAML_SYNTAX",
        key=error.path or name,
        message=f"{_place(name, line)}: {error.path}{'=' if error.path else ''}{shown(value)} is not {rule}: {error.reason}",
        fix=fix,
        line=line,
    )


def _walk(node: Node | None, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Node]]:
    """Yield the path and the node of every value, and then of its key."""
    if isinstance(node, MappingNode):
        # What is merged first: the mapping's own keys win.
        for key, value in sorted(node.value, key=lambda pair: pair[0].value != "<<"):
            below = path if key.value == "<<" else (*path, key.value)
            yield from _walk(value, below)
            yield below, key
    elif isinstance(node, SequenceNode):
        for number, value in enumerate(node.value):
            yield from _walk(value, (*path, f"[{number}]"))
    if node is not None:
        yield path, node


def _check_keys(node: MappingNode, *, name: str) -> None:
    # Checked here and not in construction, which merges the keys of `<<` into the mapping and then checks none.
    seen: dict[str, int] = {}
    for key_node, _ in node.value:
        line = key_node.start_mark.line + 1
        kind = str(key_node.tag).rpartition(":")[2]
        if not isinstance(key_node, ScalarNode) or kind not in ("str", "merge"):
            key = key_node.value if isinstance(key_node, ScalarNode) else "of several parts"
            raise SpecError.of(
                code="YAML_KEY",
                message=f"{_place(name, line)}: key {key} is a {kind}, not a word",
                fix="Write keys as plain words, in quotes where YAML reads them as something else",
                line=line,
            )
        key = key_node.value
        if key in seen:
            raise SpecError.of(
                code="YAML_DUPLICATE",
                key=key,
                message=f"{_place(name, line)}: {key} appears twice, first on line {seen[key]}",
                fix="Keep one of the two",
                line=line,
            )
        seen[key] = line


def _count_values(node: Node, counted: dict[int, int], *, name: str) -> int:
    """Check the keys below a node and count its values with aliases expanded; `counted` caches the count of each node."""
    key = id(node)
    if (known := counted.get(key)) is not None:
        if not known:
            raise _recursive(name, "an anchor contains itself", "Write out the value instead of the alias")
        return known
    if isinstance(node, ScalarNode):
        return 1
    counted[key] = 0  # marks a node being counted: meeting it again means a cycle
    parts = node.value
    if isinstance(node, MappingNode):
        _check_keys(node, name=name)
        parts = [part for pair in node.value for part in pair]
    counted[key] = 1 + sum(_count_values(part, counted, name=name) for part in parts)
    return counted[key]


def _place(name: str, line: int | None) -> str:
    return name if line is None else f"{name}, line {line}"


def _recursive(name: str, what: str, fix: str) -> SpecError:
    return SpecError.of(code="YAML_RECURSIVE", key=name, message=f"{name}: {what}", fix=fix)


def _siblings(path: Path) -> list[str]:
    try:
        return [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return []
