"""The text of a DeepSpeed file: plain JSON, read strictly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from toolkit.errors import SpecError
from toolkit.units import format_bytes

# Bytes of a file that are read: a thousand times what configurations take, and /dev/zero ends.
_MAX_FILE_BYTES = 16 * 2**20


def read_text(path: Path) -> str:
    """Reads a file of UTF-8 text.

    Raises:
        SpecError: FILE_NOT_FOUND, FILE_UNREADABLE.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_FILE_BYTES + 1)
        if len(raw) > _MAX_FILE_BYTES:
            raise ValueError(f"it holds more than {format_bytes(_MAX_FILE_BYTES)}, and is no configuration")
        return raw.decode("utf-8")
    except FileNotFoundError:
        raise SpecError.of(
            code="FILE_NOT_FOUND", key=str(path), message=f"{path} does not exist", fix="Check the path"
        ) from None
    except (OSError, ValueError) as error:
        raise SpecError.of(
            code="FILE_UNREADABLE",
            key=str(path),
            message=f"{path} cannot be read: {getattr(error, 'strerror', None) or error}",
            fix="Name a DeepSpeed configuration: JSON text in UTF-8",
        ) from None


def parse_object(text: str, *, name: str) -> dict[str, Any]:
    """Parses one JSON object, each key once in its section; `name` stands for it in errors.

    Raises:
        SpecError: DEEPSPEED_SYNTAX, DEEPSPEED_DUPLICATE.
    """
    try:
        value = json.loads(text, object_pairs_hook=lambda pairs: _once(pairs, name), parse_constant=_no_constant)
    except RecursionError:
        raise _syntax(name, "objects are nested too deep") from None
    except ValueError as error:
        raise _syntax(name, str(error)) from None
    if not isinstance(value, dict):
        raise _syntax(name, f"it holds a {type(value).__name__}, not an object")
    return value


def _once(pairs: list[tuple[str, Any]], name: str) -> dict[str, Any]:
    """runtime/config_utils.py dict_raise_error_on_duplicate_keys."""
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise SpecError.of(
                code="DEEPSPEED_DUPLICATE",
                key=key,
                message=f"{name}: {key} appears twice in one section",
                fix="Keep one of the two",
                source="deepspeed runtime/config_utils.py dict_raise_error_on_duplicate_keys",
            )
        made[key] = value
    return made


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _syntax(name: str, what: str) -> SpecError:
    return SpecError.of(
        code="DEEPSPEED_SYNTAX",
        key=name,
        message=f"{name} is not plain JSON: {what}",
        fix="Write it as Trainer and Accelerate read it: no comments, no comma before a closing bracket; only DeepSpeed by itself takes hjson",
        source="accelerate utils/deepspeed.py HfDeepSpeedConfig",
    )
