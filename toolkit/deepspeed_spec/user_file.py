"""A user's own DeepSpeed configuration, a file or a dict, checked key by key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.deepspeed_spec.json_text import read_object
from toolkit.deepspeed_spec.user_keys import key_problems, normalized
from toolkit.errors import SpecError, raise_all

# What messages call a configuration that is no file.
UNNAMED = "deepspeed_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class UserConfig:
    """A DeepSpeed configuration that DeepSpeed accepts and the estimate can price, "auto" still in it.

    Args:
        name: The file's name, for messages.
        config: Its content, one spelling for each key.
        notes: What DeepSpeed ignores of it, or reads in another way than it is written, one sentence each.
    """

    name: str
    config: dict[str, Any]
    notes: tuple[str, ...] = ()


def read_user_config(source: Mapping[str, Any] | str | Path) -> UserConfig:
    """Reads and checks a DeepSpeed configuration of the user's own.

    Args:
        source: The configuration itself, or the path of a file with it: plain JSON, as Trainer and Accelerate take it.

    Raises:
        SpecError: With every fault at once, each with its key.
    """
    match source:
        case Mapping():
            name, written = UNNAMED, dict(source)
        case str() | Path():
            path = Path(source)
            name, written = path.name, read_object(path)
        case _:
            raise SpecError.of(
                code="DS_FILE_SYNTAX",
                key=UNNAMED,
                message=f"{UNNAMED}={source!r:.80} is a {type(source).__name__}, not a configuration",
                fix="Give a dict, or the path of a JSON file",
            )
    config = normalized(written)
    raise_all(SpecError, key_problems(config, name=name))
    return UserConfig(name=name, config=config)
