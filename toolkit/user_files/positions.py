"""Texts of YAML and JSON as the libraries read them, with the line of each key."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from toolkit.deepspeed_spec.json_text import parse_object
from toolkit.errors import SpecError, one_line

# Parts of a key's path: names of keys, and indices of lists.
Path = tuple[str, ...]

_MAX_VALUES = 100_000  # with aliases expanded; a configuration has some hundreds
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+')


def read_json(text: str, *, name: str) -> tuple[dict[str, Any], dict[Path, int]]:
    """Return a JSON object and the line of each of its keys.

    Raises:
        SpecError: DEEPSPEED_SYNTAX, DEEPSPEED_DUPLICATE.
    """
    return parse_object(text, name=name), dict(_json_lines(text))


def read_yaml(text: str, *, name: str) -> tuple[dict[str, Any], dict[Path, int], tuple[Path, ...]]:
    """Return a YAML mapping as PyYAML reads it, the line of each key, and the keys that appear twice.

    Accelerate, transformers and TRL read YAML by PyYAML, to which `no` is false and `2e-5` a text.

    Raises:
        SpecError: YAML_SYNTAX, YAML_RECURSIVE, YAML_NOT_MAPPING.
    """
    try:
        loader = yaml.SafeLoader(text)
    except yaml.YAMLError as error:  # a character that YAML does not allow
        raise _syntax(name, None, str(error)) from None
    try:
        node = loader.get_single_node()
        # Counted before merged keys are copied, which would take the memory that the count refuses.
        if node is not None and _num_values(node, {}, name=name) > _MAX_VALUES:
            raise _recursive(name, f"its aliases expand to more than {_MAX_VALUES:,} values")
        value = None if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else None
        raise _syntax(name, line, error.problem or str(error)) from None
    except (yaml.YAMLError, RecursionError, ValueError, ArithmeticError, TypeError, AttributeError) as error:
        raise _syntax(name, None, str(error)) from None
    finally:
        loader.dispose()
    if node is None or not isinstance(value, dict):
        kind = "nothing" if value is None else f"a {type(value).__name__}"
        raise SpecError.of(
            code="YAML_NOT_MAPPING",
            key=name,
            message=f"{name} is {kind}, not a mapping",
            fix="Write `key: value` lines",
        )
    lines: dict[Path, int] = {}
    twice = tuple(_yaml_lines(node, lines, (), set()))
    return {str(key): each for key, each in value.items()}, lines, twice


def dotted(path: Path) -> str:
    """Return a path as messages show it."""
    return ".".join(path).replace(".[", "[")


def line_of(lines: Mapping[Path, int], key: str) -> int | None:
    """Return the line of a dotted key, or that of the nearest section around it."""
    parts = tuple(key.replace("[", ".[").split("."))
    while parts:
        if parts in lines:
            return lines[parts]
        parts = parts[:-1]
    return None


def _json_lines(text: str) -> Iterator[tuple[Path, int]]:
    """Yield the path and line of each key of a valid JSON object."""
    stack: list[list[Any]] = []  # for each open bracket: its kind, and its current key or index
    pending: str | None = None
    line, at = 1, 0
    for found in _TOKEN.finditer(text):
        line += text.count("\n", at, found.start())
        at = found.start()
        token = found.group()
        if token in "{[":
            stack.append([token, 0 if token == "[" else None])
            pending = None
        elif token in "}]":
            stack.pop()
            pending = None
        elif token == ",":
            if stack[-1][0] == "[":
                stack[-1][1] += 1
            pending = None
        elif token == ":":
            stack[-1][1] = pending
            yield tuple(f"[{key}]" if kind == "[" else str(key) for kind, key in stack), line
        elif token[0] == '"':
            pending = json.loads(token, strict=False)


def _yaml_lines(node: yaml.Node, lines: dict[Path, int], path: Path, seen: set[int]) -> Iterator[Path]:
    """Fill in the line of each key; yield the path of each that appears twice in its section."""
    if id(node) in seen:  # an alias: the keys are where its anchor is
        return
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        own: set[str] = set()
        for key, value in node.value:
            name = str(key.value)
            below = (*path, name)
            if name in own:
                yield below
            own.add(name)
            lines[below] = key.start_mark.line + 1
            yield from _yaml_lines(value, lines, below, seen)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            lines[(*path, f"[{index}]")] = value.start_mark.line + 1
            yield from _yaml_lines(value, lines, (*path, f"[{index}]"), seen)


def _num_values(node: yaml.Node, counted: dict[int, int], *, name: str) -> int:
    """Return the number of values of a node with aliases expanded; `counted` has those of the nodes that are known."""
    if not isinstance(node, yaml.CollectionNode):
        return 1
    known = counted.get(id(node))
    if known == 0:
        raise _recursive(name, "an anchor contains itself")
    if known is None:
        counted[id(node)] = 0  # being counted: meeting it again means a circle
        pairs = isinstance(node, yaml.MappingNode)
        parts = [part for pair in node.value for part in pair] if pairs else node.value
        known = counted[id(node)] = 1 + sum(_num_values(part, counted, name=name) for part in parts)
    return known


def _recursive(name: str, what: str) -> SpecError:
    return SpecError.of(
        code="YAML_RECURSIVE", key=name, message=f"{name}: {what}", fix="Write out the values in place of the aliases"
    )


def _syntax(name: str, line: int | None, what: str) -> SpecError:
    place = name if line is None else f"{name}, line {line}"
    return SpecError.of(
        code="YAML_SYNTAX",
        key=name,
        message=f"{place}: {one_line(what)}",
        fix="Fix the YAML at that line" if line else "Fix the YAML",
        line=line,
    )
