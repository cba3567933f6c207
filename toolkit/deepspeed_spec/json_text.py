"""The text of a DeepSpeed file: plain JSON, read strictly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from toolkit.errors import SpecError


def read_object(path: Path) -> dict[str, Any]:
    """Reads a file that holds one JSON object, each key once in its section.

    Raises:
        SpecError: FILE_NOT_FOUND, FILE_UNREADABLE, DS_FILE_SYNTAX, DS_FILE_DUPLICATE.
    """
    try:
        text = path.read_bytes().decode("utf-8")
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
    try:
        value = json.loads(text, object_pairs_hook=lambda pairs: _once(pairs, path), parse_constant=_no_constant)
    except RecursionError:
        raise _syntax(path, "objects are nested too deep") from None
    except ValueError as error:
        raise _syntax(path, str(error)) from None
    if not isinstance(value, dict):
        raise _syntax(path, f"it holds a {type(value).__name__}, not an object")
    return value


def _once(pairs: list[tuple[str, Any]], path: Path) -> dict[str, Any]:
    """runtime/config_utils.py dict_raise_error_on_duplicate_keys."""
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise SpecError.of(
                code="DS_FILE_DUPLICATE",
                key=key,
                message=f"{path.name}: {key} appears twice in one section",
                fix="Keep one of the two",
                source="deepspeed runtime/config_utils.py dict_raise_error_on_duplicate_keys",
            )
        made[key] = value
    return made


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _syntax(path: Path, what: str) -> SpecError:
    return SpecError.of(
        code="DS_FILE_SYNTAX",
        key=str(path),
        message=f"{path.name} is not plain JSON: {what}",
        fix="Write it as Trainer and Accelerate read it: no comments, no comma before a closing bracket; only DeepSpeed by itself takes hjson",
        source="accelerate utils/deepspeed.py HfDeepSpeedConfig",
    )
