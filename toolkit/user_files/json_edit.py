"""Changes of a JSON text that leave everything else as it is written: numbers, indentation, order."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+')


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """Where a member of an object stands: from its key to the end of its value."""

    key: int
    value: int
    end: int


def with_value(text: str, path: tuple[str, ...], value: Any) -> str:
    """Return a JSON text with a value set, in a member of its own where the key is not there.

    >>> with_value('{"a": 1e9, "b": {"c": 2}}', ("b", "d"), 3)
    '{"a": 1e9, "b": {"c": 2, "d": 3}}'
    """
    spans = dict(_spans(text))
    if path in spans:
        return f"{text[: spans[path].value]}{_written(value)}{text[spans[path].end :]}"
    parent = path[:-1]
    if parent and (parent not in spans or text[spans[parent].value] != "{"):
        if parent in spans and text[spans[parent].value : spans[parent].end] != "null":
            return text
        return with_value(text, parent, {path[-1]: value})
    members = [span for other, span in spans.items() if other[:-1] == parent]
    added = f"{json.dumps(path[-1])}: {_written(value)}"
    if members:
        last = members[-1]
        space = re.search(r"\s*\Z", text[: last.key])
        between = space.group() if space and space.group() else " "
        if len(members) == 1 and "\n" not in between:
            between = " "
        return f"{text[: last.end]},{between}{added}{text[last.end :]}"
    opening = text.index("{", spans[parent].value if parent else 0)
    return f"{text[: opening + 1]}{added}{text[text.index('}', opening) :]}"


def without(text: str, path: tuple[str, ...]) -> str:
    """Return a JSON text without a member.

    >>> without('{"a": 1e9, "b": 2}', ("b",)), without('{"a": 1e9, "b": 2}', ("a",))
    ('{"a": 1e9}', '{"b": 2}')
    """
    spans = dict(_spans(text))
    if path not in spans:
        return text
    span = spans[path]
    behind = re.match(r"\s*,\s*", text[span.end :])
    if behind:
        return text[: span.key] + text[span.end + behind.end() :]
    before = text[: span.key].rstrip()
    return (before[:-1] if before.endswith(",") else before) + text[span.end :]


def _written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _spans(text: str) -> Iterator[tuple[tuple[str, ...], _Span]]:
    """Yield the path and place of each member of objects that are in no list, in a valid text; members in order of their ends."""
    stack: list[tuple[str, int]] = []  # the key whose value is open, and where that begins
    brackets: list[str] = []
    path: list[str] = []
    keys: list[int] = []
    pending: tuple[str, int] | None = None
    awaits = False  # a value, behind a colon
    for found in _TOKEN.finditer(text):
        token = found.group()
        if token == ":":
            awaits = True
            continue
        if token in "}]":
            brackets.pop()
            if stack and len(stack) == len(brackets) and "[" not in brackets:
                _, begins = stack.pop()
                yield tuple(path), _Span(key=keys.pop(), value=begins, end=found.end())
                path.pop()
            continue
        if token == ",":
            continue
        is_member = awaits and pending is not None and "[" not in brackets
        if token in "{[":
            if is_member and pending is not None:
                path.append(pending[0])
                keys.append(pending[1])
                stack.append((pending[0], found.start()))
            brackets.append(token)
        elif is_member and pending is not None:
            yield (*path, pending[0]), _Span(key=pending[1], value=found.start(), end=found.end())
        elif token[0] == '"' and not awaits:
            pending = (json.loads(token, strict=False), found.start())
        awaits = False


def is_same(text: str, wanted: Mapping[str, Any]) -> bool:
    """Return whether a text holds these values."""
    try:
        return bool(json.loads(text) == wanted)
    except ValueError:
        return False
