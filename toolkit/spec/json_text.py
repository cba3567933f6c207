"""Parses JSON that others wrote: every fault of it is a ValueError."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_TOO_DEEP = "lists or objects are nested too deep"


def parse_json(text: str | bytes) -> Any:
    """Parses one JSON value.

    Raises:
        ValueError: JSONDecodeError, UnicodeDecodeError, a number of thousands of digits, or nesting that Python's
            parser cannot follow, which it reports as RecursionError.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def parse_json_at(text: str, at: int) -> tuple[Any, int]:
    """Parses the value that begins at an offset, and gives the offset past it; raises as `parse_json` does."""
    try:
        return json.JSONDecoder().raw_decode(text, at)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def read_json_object(path: Path) -> dict[str, Any]:
    """Reads a file that holds one JSON object.

    Raises:
        OSError, ValueError: It cannot be read, is not JSON, or holds another value.
    """
    value = parse_json(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f"it holds a {type(value).__name__}, not an object")
    return value
