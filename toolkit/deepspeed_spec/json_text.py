"""The text of a DeepSpeed file: plain JSON, read strictly."""

from __future__ import annotations

import json
from typing import Any

from toolkit.errors import SpecError

# Expected form of a file, for errors.
KIND = "a DeepSpeed configuration: JSON"


def parse_object(text: str, *, name: str) -> dict[str, Any]:
    """Parse one JSON object, each key once in its section; errors call it `name`.

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
        raise _syntax(name, f"it is a {type(value).__name__}, not an object")
    return value


def _once(pairs: list[tuple[str, Any]], name: str) -> dict[str, Any]:
    """Refuse duplicate keys, as runtime/config_utils.py dict_raise_error_on_duplicate_keys does."""
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
    raise ValueError(f"{name} is not a JSON number")


def _syntax(name: str, what: str) -> SpecError:
    return SpecError.of(
        code="DEEPSPEED_SYNTAX",
        key=name,
        message=f"{name} is not plain JSON: {what}",
        fix="Write it as Trainer and Accelerate read it: no comments, no comma before a closing bracket; only "
        "DeepSpeed alone accepts hjson",
        source="accelerate utils/deepspeed.py HfDeepSpeedConfig",
    )
