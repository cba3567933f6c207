"""Validation of a DeepSpeed configuration as DeepSpeed reads it, and the values that result."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from toolkit.arguments import shown
from toolkit.config.suggestions import nearest
from toolkit.deepspeed_spec.consistency import contradictions
from toolkit.deepspeed_spec.fields import is_auto
from toolkit.deepspeed_spec.findings import Finding
from toolkit.deepspeed_spec.nested import without
from toolkit.deepspeed_spec.old_keys import bring_up_to_date, removed_keys, replace_deprecated
from toolkit.deepspeed_spec.schema import (
    OLD_KEYS,
    DeepSpeedConfig,
    field_of,
    is_checked,
    key_of,
    schema_paths,
    section_of,
)
from toolkit.deepspeed_spec.zero import Zero

_BOOLEAN = TypeAdapter(bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A configuration as DeepSpeed reads it.

    Args:
        config: Keys that it reads, each by one name and with DeepSpeed's type; without what it refuses or ignores.
        keys: The same, with DeepSpeed's defaults for missing keys.
        findings: Values that it refuses, ignores or reads in another way than they are written.
    """

    config: dict[str, Any]
    keys: DeepSpeedConfig
    findings: tuple[Finding, ...]


def read_config(written: Mapping[str, Any]) -> Reading:
    """Read a configuration as DeepSpeed does.

    Source:
        deepspeed runtime/config.py DeepSpeedConfig, runtime/config_utils.py DeepSpeedConfigModel.
    """
    findings = removed_keys(written)
    config = copy.deepcopy(without(written, [finding.path for finding in findings]))
    findings += bring_up_to_date(config)
    findings += _unread(config, DeepSpeedConfig)
    keys, refused = _validate(config)
    findings += refused
    findings += _reread(config, keys)
    read = _written(keys)
    findings += replace_deprecated(read)
    keys = DeepSpeedConfig.model_validate(read)
    findings += contradictions(keys)
    return Reading(config=read, keys=keys, findings=tuple(findings))


def _unread(section: Mapping[str, Any], model: type[BaseModel], prefix: str = "") -> Iterator[Finding]:
    """Yield the keys that DeepSpeed never reads, and every "auto" that it drops."""
    for key, value in section.items():
        path, name = f"{prefix}{key}", field_of(key, model)
        drops = is_checked(model) and is_auto(value)
        if name is None:
            if drops or not is_checked(model):
                yield _unknown(path, model, refused=False)
            continue
        inner = section_of(model.model_fields[name].annotation)
        if inner is not None and isinstance(value, Mapping):
            yield from _unread(value, inner, f"{path}.")
        elif drops:
            default = model.model_fields[name].get_default(call_default_factory=True)
            kept = "its default" if isinstance(default, BaseModel) else f"its default, {shown(default)}"
            yield Finding(
                code="DEEPSPEED_AUTO",
                path=path,
                message=f'="auto", which is not filled in there: DeepSpeed uses {kept}',
                fix="Write the value, or leave the key out",
                outcome="other",
                source="deepspeed runtime/config_utils.py DeepSpeedConfigModel",
            )


def _unknown(path: str, model: type[BaseModel], *, refused: bool) -> Finding:
    section, _, key = path.rpartition(".")
    names = [key_of(name, model) for name in model.model_fields]
    siblings = names if section else [*names, *OLD_KEYS]
    near = nearest(key, siblings)
    meant = f"{section}.{near[0]}".lstrip(".") if near else ""
    if not section and field_of(key, Zero) is not None:
        meant = f"zero_optimization.{key}"  # written outside of its section
    elif refused and not meant:
        elsewhere = [known for known in schema_paths() if known.rpartition(".")[2] == key]
        meant = elsewhere[0] if len(elsewhere) == 1 else ""
    return Finding(
        code="DEEPSPEED_UNKNOWN",
        path=path,
        message=" is not a key of DeepSpeed, which " + ("refuses it" if refused else "ignores it"),
        fix="Remove it",
        outcome="refused" if refused else "meant" if meant else "other",
        meant=meant,
    )


def _validate(config: Mapping[str, Any]) -> tuple[DeepSpeedConfig, list[Finding]]:
    """Return the valid keys of a configuration, and findings for the others."""
    findings: list[Finding] = []
    while True:
        try:
            return DeepSpeedConfig.model_validate(config), findings
        except ValidationError as error:
            # The rest of a section is checked again without the wrong value.
            found = _refused(error)
            findings += found.values()
            rest = without(config, found)
            # An error that names no key would be raised again.
            config = rest if rest != config else without(config, {path.partition(".")[0] for path in found})


def _refused(error: ValidationError) -> dict[str, Finding]:
    """Return one finding per key, by path: pydantic reports each member of a union and each item of a list."""
    findings: dict[str, Finding] = {}
    for detail in error.errors(include_url=False):
        path, model = _path_of(detail["loc"])
        if detail["type"] == "extra_forbidden":
            findings.setdefault(path, _unknown(path, model, refused=True))
            continue
        value = detail["input"]
        findings.setdefault(
            path,
            Finding(
                code="DEEPSPEED_AUTO" if is_auto(value) else "DEEPSPEED_VALUE",
                path=path,
                message=f"={shown(value)} ({type(value).__name__}) is not valid",
                fix=detail["msg"].removeprefix("Value error, "),
                outcome="refused",
            ),
        )
    return findings


def _path_of(location: tuple[int | str, ...]) -> tuple[str, type[BaseModel]]:
    """Return the dotted path of a key in an error of pydantic, and the section of the key."""
    model: type[BaseModel] = DeepSpeedConfig
    parts: list[str] = []
    for part in location:
        parts.append(str(part))
        name = field_of(str(part), model)
        inner = section_of(model.model_fields[name].annotation) if name is not None else None
        if inner is None or len(parts) == len(location):
            break
        model = inner
    return ".".join(parts), model


def _reread(section: Mapping[str, Any], keys: BaseModel, prefix: str = "") -> Iterator[Finding]:
    """Yield values that DeepSpeed reads in another way than they are written: true as 1, "false" as true."""
    for key, value in section.items():
        name = field_of(key, type(keys))
        if name is None or name not in keys.model_fields_set:
            continue
        read = getattr(keys, name)
        if isinstance(read, BaseModel) and isinstance(value, Mapping):
            yield from _reread(value, read, f"{prefix}{key}.")
        elif _is_misread(value, read):
            yield Finding(
                code="DEEPSPEED_VALUE",
                path=f"{prefix}{key}",
                message=f"={shown(value)} ({type(value).__name__}), which DeepSpeed reads as {str(read).lower()}",
                fix="Write the value explicitly",
                outcome="other",
            )


def _is_misread(written: Any, read: Any) -> bool:
    if not isinstance(read, bool):
        return isinstance(written, bool) and isinstance(read, int | float)
    if written is None:  # equivalent to false
        return False
    try:
        return _BOOLEAN.validate_python(written) is not read
    except ValidationError:
        return True


def _written(keys: BaseModel) -> dict[str, Any]:
    """Return the values of a section as JSON has them, without each null that means the default."""
    made: dict[str, Any] = {}
    for name, field in type(keys).model_fields.items():
        value = getattr(keys, name)
        if name not in keys.model_fields_set or (value is None and field.default is None):
            continue
        if isinstance(value, BaseModel):
            value = _written(value)
        made[key_of(name, type(keys))] = str(value) if isinstance(value, Path) else value
    return made
