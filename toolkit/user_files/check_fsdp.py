"""The section fsdp_config of Accelerate: what its FullyShardedDataParallelPlugin makes of each value, for FSDP's two versions.

`accelerate launch` takes over any key and passes on those that it knows, as texts of environment variables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from toolkit.arguments import shown
from toolkit.config.suggestions import nearest
from toolkit.deepspeed_spec.nested import subsection
from toolkit.units import whole_number
from toolkit.user_files.arguments import launcher_options
from toolkit.user_files.read import UserFile
from toolkit.user_files.report import Edit, Found, Level, versioned
from toolkit.user_files.setup import Setup

_PASSED_ON = "accelerate utils/launch.py prepare_multi_gpu_env"
_PLUGIN = "accelerate utils/dataclasses.py FullyShardedDataParallelPlugin.__post_init__"

# Names that each key takes, in the order of the numbers that stand for them, from 1 (accelerate utils/constants.py, torch's enums).
_NAMES: Mapping[str, tuple[str, ...]] = {
    "fsdp_sharding_strategy": ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"),
    "fsdp_backward_prefetch": ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"),
    "fsdp_state_dict_type": ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"),
    "fsdp_auto_wrap_policy": ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"),
}
# Highest number that a key takes for a name.
_NUMBERS = {"fsdp_sharding_strategy": 5, "fsdp_backward_prefetch": 2, "fsdp_state_dict_type": 3}
_BOTH = (
    *("fsdp_offload_params", "fsdp_activation_checkpointing", "fsdp_activation_checkpointing_offload"),
    "fsdp_cpu_ram_efficient_loading",
)
_FIRST_ALONE = ("fsdp_use_orig_params", "fsdp_sync_module_states", "fsdp_forward_prefetch")
_TRUE, _FALSE = ("y", "yes", "t", "true", "on", "1"), ("n", "no", "f", "false", "off", "0")


def check_fsdp(file: UserFile, setup: Setup) -> Iterator[Found]:
    """Yield keys that Accelerate does not read, and values that its plugin refuses or that the version has no use for."""
    section = subsection(file.keys, "fsdp_config")
    if file.keys.get("distributed_type") != "FSDP" or not section:
        return
    known = {name for name in launcher_options("accelerate") if name.startswith("fsdp_")} | {"fsdp_ignored_modules"}
    values = {key if key.startswith("fsdp") else f"fsdp_{key}": (key, value) for key, value in section.items()}
    command = None if setup.command is None else setup.command[1]
    for name, (key, value) in values.items():
        if len(known) > 1 and name not in known:
            yield _unknown(file, key, value, name, known, values)
    given = {
        name: pair
        for name, pair in values.items()
        if name in known and (command is None or command.option(name) is None)  # an option takes the place of a key
    }
    version = str(given.get("fsdp_version", ("", "1"))[1])
    if version not in ("1", "2"):
        key = given["fsdp_version"][0]
        yield _found(file, "error", key, f"={shown(given['fsdp_version'][1])} is neither 1 nor 2", "Write 1 or 2")
        return
    for name, (key, value) in given.items():
        yield from _value(file, name, key, value, version)
    yield from _together(file, given, version)


def _found(
    file: UserFile,
    level: Level,
    key: str,
    message: str,
    fix: str,
    *,
    code: str = "ACCELERATE_VALUE",
    source: str = _PLUGIN,
    edits: tuple[Edit, ...] = (),
) -> Found:
    path = f"fsdp_config.{key}"
    return Found(
        level=level,
        code=code,
        file=file.name,
        line=file.line(path),
        key=path,
        value=str(subsection(file.keys, "fsdp_config").get(key, "")),
        message=f"{path}{message}",
        fix=fix,
        source=versioned(source),
        edits=edits,
    )


def _edit(file: UserFile, key: str, value: Any = None, *, removes: bool = False) -> Edit:
    return Edit(file=file.name, path=("fsdp_config", key), action="remove" if removes else "set", value=value)


def _unknown(
    file: UserFile, key: str, value: Any, name: str, known: set[str], values: Mapping[str, tuple[str, Any]]
) -> Found:
    near = [each for each in nearest(name, sorted(known)) if each not in values]
    edits: tuple[Edit, ...] = (_edit(file, key, removes=True),)
    edits += (_edit(file, near[0], value),) if near else ()
    fix = f"Did you mean {near[0]}" if near else "Remove it"
    message = " is no key that Accelerate reads there"
    return _found(file, "warning", key, message, fix, code="ACCELERATE_IGNORED", source=_PASSED_ON, edits=edits)


def _value(file: UserFile, name: str, key: str, value: Any, version: str) -> Iterator[Found]:
    text = str(value)
    first = version == "1"
    if name in _BOTH or (name in _FIRST_ALONE and first) or (name == "fsdp_reshard_after_forward" and not first):
        if text.lower() not in (*_TRUE, *_FALSE):
            yield _found(file, "error", key, f"={shown(value)} is neither true nor false", "Write true or false")
    elif name in _FIRST_ALONE or (name == "fsdp_sharding_strategy" and not first):
        fix = "Write fsdp_reshard_after_forward" if name == "fsdp_sharding_strategy" else "Remove it"
        yield _without_effect(file, key, version, fix)
    elif name == "fsdp_reshard_after_forward":
        yield _without_effect(file, key, version, "Write fsdp_sharding_strategy")
    elif name in _NAMES and (value is not None or name == "fsdp_sharding_strategy"):
        yield from _one_of(file, name, key, text, version)
    elif name == "fsdp_min_num_params" and not text.isdigit():
        level: Level = "error" if _policy(file) == "SIZE_BASED_WRAP" else "warning"
        yield _found(file, level, key, f"={shown(value)} is no whole number", "Write a number of parameters")


def _one_of(file: UserFile, name: str, key: str, text: str, version: str) -> Iterator[Found]:
    names = _NAMES[name]
    is_number = 1 <= (whole_number(text) or 0) <= _NUMBERS.get(name, 0)
    allowed = [each for each in names if version == "1" or each != "LOCAL_STATE_DICT"]
    if not is_number and text.upper() not in allowed and text.upper() != "_HYBRID_SHARD_ZERO2":
        near = nearest(text.upper(), allowed) or [each for each in allowed if each.startswith(text.upper())]
        edits = (_edit(file, key, near[0]),) if near else ()
        fix = f"Write {near[0]}" if near else f"Write one of {', '.join(allowed)}"
        what = "is not for version 2" if text.upper() in names else f"is none of {', '.join(allowed)}"
        yield _found(file, "error", key, f"={shown(text)} {what}", fix, edits=edits)
    elif name == "fsdp_backward_prefetch" and version == "2" and text.upper() != "NO_PREFETCH":
        yield _without_effect(file, key, version, "Remove it")


def _without_effect(file: UserFile, key: str, version: str, fix: str) -> Found:
    message = f" has no effect with fsdp_version={version}"
    edits = (_edit(file, key, removes=True),) if fix == "Remove it" else ()
    return _found(file, "warning", key, message, fix, code="ACCELERATE_IGNORED", edits=edits)


def _policy(file: UserFile) -> str:
    section = subsection(file.keys, "fsdp_config")
    return str(section.get("fsdp_auto_wrap_policy", section.get("auto_wrap_policy"))).upper()


def _together(file: UserFile, given: Mapping[str, tuple[str, Any]], version: str) -> Iterator[Found]:
    """Yield values that Accelerate refuses because of others."""
    sync = given.get("fsdp_sync_module_states")
    if sync is not None and not sync[1] and given.get("fsdp_cpu_ram_efficient_loading", ("", "true"))[1]:
        message = "=false beside fsdp_cpu_ram_efficient_loading, which is true unless it is set: `accelerate launch` refuses the two"
        fix = "Write true, or set fsdp_cpu_ram_efficient_loading to false too"
        yield _found(file, "error", sync[0], message, fix, source=_PASSED_ON)
    offload = given.get("fsdp_activation_checkpointing_offload")
    if offload is None or str(offload[1]).lower() not in _TRUE:
        return
    if str(given.get("fsdp_activation_checkpointing", ("", False))[1]).lower() not in _TRUE:
        message, fix = " needs fsdp_activation_checkpointing", "Set fsdp_activation_checkpointing to true"
        yield _found(file, "error", offload[0], message, fix)
    if version == "1":
        yield _found(file, "error", offload[0], " needs fsdp_version=2", "Set fsdp_version to 2, or remove it")
