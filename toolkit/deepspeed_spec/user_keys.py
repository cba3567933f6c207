"""What is wrong with the keys of a person's own DeepSpeed file, and one spelling for those that have two.

Source: deepspeed 0.19.8 runtime/config.py, runtime/config_utils.py; transformers integrations/deepspeed.py.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from toolkit.deepspeed_spec.schema import REMOVED, leaf_values, schema_paths
from toolkit.deepspeed_spec.user_schema import (
    ALIASED,
    OTHER_AUTO,
    PRICED_OPTIMIZERS,
    TRAINER_AUTO,
    UNPRICED,
    FileKeys,
)
from toolkit.errors import Problem
from toolkit.spec.suggestions import nearest_key


def normalized(config: Mapping[str, Any]) -> dict[str, Any]:
    """Gives a configuration with one spelling for each thing, as DeepSpeed reads it: 5e8 is a whole number."""
    made: dict[str, Any] = _whole_numbers(copy.deepcopy(dict(config)))
    if "bfloat16" in made and "bf16" not in made:
        made["bf16"] = made.pop("bfloat16")
    zero = made.get("zero_optimization")
    if isinstance(zero, dict):
        for name in ALIASED:
            if name in zero and f"stage3_{name}" not in zero:
                zero[f"stage3_{name}"] = zero.pop(name)
        pinned = zero.pop("cpu_offload_use_pin_memory", None)
        for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
            if zero.pop(old, None) is True and new not in zero:
                zero[new] = {"device": "cpu"} if pinned is None else {"device": "cpu", "pin_memory": pinned}
        for name in ("offload_optimizer", "offload_param", "overlap_comm", "zenflow"):
            if name in zero and zero[name] is None:
                del zero[name]
    return made


def key_problems(config: Mapping[str, Any], *, name: str) -> Iterator[Problem]:
    """Says what DeepSpeed would refuse, ignore or drop in a normalized configuration, and what cannot be estimated.

    Args:
        config: As `normalized` gave it.
        name: Of the file.
    """
    removed = [path for path in REMOVED if _lookup(config, path) is not None]
    for path in removed:
        yield Problem(
            code="DS_FILE_REMOVED",
            key=path,
            message=f"{name}: {path} was removed from DeepSpeed",
            fix=REMOVED[path] if path.startswith("zero_optimization.") else "Remove it",
            source="deepspeed runtime/config.py _reject_removed_config_keys",
        )
    autos = auto_paths(config)
    for path in sorted(autos - TRAINER_AUTO - set(OTHER_AUTO)):
        yield Problem(
            code="DS_FILE_AUTO",
            key=path,
            message=f'{name}: {path}="auto" is no value that Trainer fills in: DeepSpeed drops it for its default, or fails',
            fix="Write the value, or leave the key out",
            source="transformers integrations/deepspeed.py trainer_config_process",
        )
    for path, is_on in UNPRICED.items():
        value = _lookup(config, path)
        if value is not None and value != "auto" and is_on(value):
            fix = f"Set it to one of {', '.join(PRICED_OPTIMIZERS)}" if path == "optimizer.type" else "Turn it off"
            yield Problem(
                code="DS_FILE_UNPRICED",
                key=path,
                message=f"{name}: {path}={value!r:.60} changes memory in a way that the estimate does not know",
                fix=f"{fix}, to estimate the rest",
            )
    yield from _typing_problems(config, name=name, settled={*removed, *autos})


def _typing_problems(config: Mapping[str, Any], *, name: str, settled: set[str]) -> Iterator[Problem]:
    try:
        FileKeys.model_validate(without(config, settled))
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            path = ".".join(str(part) for part in detail["loc"])
            if detail["type"] == "extra_forbidden":
                yield _unknown(path, name=name)
            else:
                given = detail["input"]
                yield Problem(
                    code="DS_FILE_VALUE",
                    key=path,
                    message=f"{name}: {path}={given!r:.80} ({type(given).__name__}) is not valid",
                    fix=detail["msg"],
                    source="deepspeed runtime/config.py",
                )


def _unknown(path: str, *, name: str) -> Problem:
    section, _, _ = path.rpartition(".")
    siblings = [known for known in schema_paths(FileKeys) if known.rpartition(".")[0] == section]
    near = nearest_key(path, siblings)
    return Problem(
        code="DS_FILE_UNKNOWN",
        key=path,
        message=f"{name}: {path} is not a key of DeepSpeed, which would ignore or refuse it",
        fix=f"Did you mean {near[0]}" if near else "Remove it",
        source="deepspeed runtime/config.py",
    )


def without(config: Mapping[str, Any], paths: set[str], prefix: str = "") -> dict[str, Any]:
    """Gives a configuration without the values at dotted paths."""
    return {
        key: without(value, paths, f"{prefix}{key}.") if isinstance(value, Mapping) else value
        for key, value in config.items()
        if f"{prefix}{key}" not in paths
    }


def auto_paths(config: Mapping[str, Any]) -> set[str]:
    """Gives the dotted paths of all values that are "auto"."""
    return {path for path, value in leaf_values(config) if value == "auto"}


def _whole_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _whole_numbers(item) for key, item in value.items()}
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _lookup(config: Mapping[str, Any], path: str) -> Any:
    node: Any = config
    for part in path.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return None
        node = node[part]
    return node
