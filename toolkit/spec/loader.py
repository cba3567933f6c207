"""Reads a job file strictly: duplicate keys, foreign names and numbers written as strings are errors with a fix."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from toolkit.errors import Problem, SpecError
from toolkit.spec.job import Job
from toolkit.units import format_bytes

# Spellings of transformers.TrainingArguments and trl.SFTConfig, and where we keep the same thing.
FOREIGN_KEYS: dict[str, str] = {
    "optim": "train.optimizer (adamw, adamw_torch, lion or sgd)",
    "bf16": "train.precision: bf16",
    "fp16": "train.precision: fp16",
    "mixed_precision": "train.precision",
    "torch_dtype": "train.precision",
    "dtype": "train.precision",
    "max_length": "train.sequence_length",
    "max_seq_length": "train.sequence_length",
    "cutoff_len": "train.sequence_length",
    "micro_batch_size": "train.per_device_train_batch_size",
    "train_micro_batch_size_per_gpu": "train.per_device_train_batch_size",
    "batch_size": "train.per_device_train_batch_size or train.train_batch_size",
    "gradient_clipping": "train.max_grad_norm",
    "attn_implementation": "train.attention",
    "assistant_only_loss": "data.loss_on: assistant",
    "completion_only_loss": "data.loss_on: completion",
    "tensor_parallel_size": "parallel.tensor",
    "pipeline_parallel_size": "parallel.pipeline",
    "stage": "parallel.zero_stage",
    "zero": "parallel.zero_stage",
    "lr": "train.learning_rate",
    "scheduler": "train.lr_scheduler_type",
    "num_epochs": "train.num_train_epochs",
    "epochs": "train.num_train_epochs",
    "dataset": "data.train",
    "num_gpus": "cluster.gpus_per_node",
    "num_nodes": "cluster.nodes",
    "use_peft": "train.method: lora",
    "lora_r": "train.lora.r",
    "load_in_4bit": "nothing yet: this version trains full weights and LoRA",
    "model_name_or_path": "model",
    "gradient_checkpointing_enable": "train.gradient_checkpointing",
}

# "8" in quotes where a number is asked for; what a person means is a number.
_NUMBER = re.compile(r"^[+-]?(\d+(_\d+)*(\.\d*)?|\.\d+)([eE][+-]?\d+)?$", re.ASCII)

# Longest excerpt of a wrong value that an error repeats, characters.
_SHOWN_CHARACTERS = 80

# Bytes of a job file that are read: a thousand times what jobs take, and /dev/zero ends.
_MAX_FILE_BYTES = 16 * 2**20
# Values of a document once its aliases are written out: a few lines of nested aliases can stand for billions.
_MAX_VALUES = 100_000

# YAML 1.1 without its numbers of base 8 (010 is 8) and base 60 (1:30 is 90), which nobody means, and with the 5e8 and
# 1e-4 of YAML 1.2.
_NUMBER_FORMS = {
    "tag:yaml.org,2002:int": r"[-+]?(?:0b[0-1_]+|0x[0-9a-fA-F_]+|0|[1-9][0-9_]*)$",
    "tag:yaml.org,2002:float": r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?$"
    r"|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$",
}


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a mapping with the same key twice, and reads numbers as people do."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own name and form
        first: [(tag, re.compile(_NUMBER_FORMS[tag]) if tag in _NUMBER_FORMS else form) for tag, form in forms]
        for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Checked here and not on construction: by then `<<` may have copied the keys of another mapping into this one.
        node = super().compose_mapping_node(anchor)
        seen: dict[str, int] = {}
        for key_node, _ in node.value:
            line = key_node.start_mark.line + 1
            kind = key_node.tag.rpartition(":")[2]
            if not isinstance(key_node, yaml.ScalarNode) or kind not in ("str", "merge"):
                shown = key_node.value if isinstance(key_node, yaml.ScalarNode) else "of several parts"
                raise SpecError.of(
                    code="YAML_KEY",
                    message=f"{self.name}, line {line}: key {shown} is a {kind}, not a word",
                    fix="Write keys as plain words, in quotes where YAML reads them as something else",
                )
            key = key_node.value
            if key in seen:
                raise SpecError.of(
                    code="YAML_DUPLICATE",
                    key=key,
                    message=f"{self.name}, line {line}: {key} appears twice, first on line {seen[key]}",
                    fix="Keep one of the two",
                )
            seen[key] = line
        return node


def load_yaml(path: Path) -> dict[str, Any]:
    """Reads one YAML mapping.

    Raises:
        SpecError: FILE_NOT_FOUND, FILE_UNREADABLE, YAML_SYNTAX, YAML_KEY, YAML_DUPLICATE, YAML_RECURSIVE or
            YAML_NOT_MAPPING.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_FILE_BYTES + 1)
        if len(raw) > _MAX_FILE_BYTES:
            raise ValueError(f"it holds more than {format_bytes(_MAX_FILE_BYTES)}, and is no job")
        text = raw.decode("utf-8")
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, _siblings(path), n=1)
        fix = f"Did you mean {path.parent / near[0]}" if near else "Check the path"
        raise SpecError.of(code="FILE_NOT_FOUND", key=str(path), message=f"{path} does not exist", fix=fix) from None
    except (OSError, ValueError) as error:  # ValueError: bytes that are not UTF-8, a path with a zero byte
        raise SpecError.of(
            code="FILE_UNREADABLE",
            key=str(path),
            message=f"{path} cannot be read: {getattr(error, 'strerror', None) or error}",
            fix="Name a job file: YAML text in UTF-8",
        ) from None
    return parse_yaml(text, name=str(path))


def parse_yaml(text: str, *, name: str) -> dict[str, Any]:
    """Parses YAML text whose top level is a mapping; `name` stands for it in errors."""
    try:
        value = _load_value(text, name=name)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{name}, line {mark.line + 1}" if mark else name
        problem = " ".join((getattr(error, "problem", None) or str(error)).split())
        if problem == "but found another document":
            problem = "a second document begins, and a job is one"
        raise SpecError.of(
            code="YAML_SYNTAX", key=name, message=f"{where}: {problem}", fix="Mend the YAML there"
        ) from None
    if not isinstance(value, dict):
        kind = "nothing" if value is None else f"a {type(value).__name__}"
        raise SpecError.of(
            code="YAML_NOT_MAPPING",
            key=name,
            message=f"{name} holds {kind}, not a mapping",
            fix="Start with `model:`, `cluster:` and `train:`",
        )
    return value


def _load_value(text: str, *, name: str) -> Any:
    """Parses any YAML value; whatever the parser trips over is a YAMLError or a SpecError."""
    try:
        loader = _StrictLoader(text)
        loader.name = name
        try:
            node = loader.get_single_node()
            if node is not None and _count_values(node, {}, name=name) > _MAX_VALUES:
                raise _recursive(
                    name, f"its aliases stand for more than {_MAX_VALUES:,} values", "Write out what the job needs"
                )
            value = None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
        json.dumps(value, default=str)  # as deep as this is what emit can write
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        # SafeLoader lets the errors of int(), datetime() and its table of booleans through.
        raise yaml.YAMLError(f"a value is not what its tag or its form says: {error}") from None
    except RecursionError:
        raise _recursive(name, "sections are nested too deep", "Remove levels: a job has four at most") from None
    return value


def _count_values(node: yaml.Node, counted: dict[int, int], *, name: str) -> int:
    """Counts the values below a node as often as aliases repeat them; `counted` keeps each node's own count."""
    key = id(node)
    if (known := counted.get(key)) is not None:
        if not known:
            raise _recursive(name, "an anchor stands inside itself", "Write the value out in place of the alias")
        return known
    if isinstance(node, yaml.ScalarNode):
        return 1
    counted[key] = 0  # being counted: to meet it again is to be inside it
    parts = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
    counted[key] = 1 + sum(_count_values(part, counted, name=name) for part in parts)
    return counted[key]


def _recursive(name: str, what: str, fix: str) -> SpecError:
    return SpecError.of(code="YAML_RECURSIVE", key=name, message=f"{name}: {what}", fix=fix)


def load_job(path: Path, *, overrides: tuple[str, ...] = ()) -> Job:
    """Reads a job file and applies `--set` overrides; relative paths stay relative to the working directory."""
    document = load_yaml(path)
    for override in overrides:
        apply_override(document, override)
    return parse_job(document)


def apply_override(document: dict[str, Any], override: str) -> None:
    """Changes one value in place: `train.sequence_length=8192`; the value is YAML.

    Raises:
        SpecError: SET_SYNTAX when it is not key=value, or the key leads through a value that is not a section.
    """
    key, separator, text = override.partition("=")
    key = key.strip()
    if not separator or not all(key.split(".")):
        raise SpecError.of(
            code="SET_SYNTAX",
            key=override,
            message=f"--set {override!r} is not key=value, or a word of its key is empty",
            fix="Write --set train.sequence_length=8192",
        )
    *parents, leaf = key.split(".")
    node = document
    for depth, parent in enumerate(parents):
        if node.get(parent) is None:
            node[parent] = {}
        child = node[parent]
        if depth == 0 and parent == "model" and isinstance(child, str):
            child = node["model"] = {"name": child}
        if not isinstance(child, dict):
            path = ".".join(parents[: depth + 1])
            raise SpecError.of(
                code="SET_SYNTAX",
                key=key,
                message=f"--set {override}: {path} is {child!r}, not a section",
                fix=f"Set {path} itself",
            )
        node = child
    try:
        value = _load_value(text, name=f"--set {key}")
    except yaml.YAMLError:
        value = text
    node[leaf] = value


def parse_job(document: Mapping[str, Any]) -> Job:
    """Builds a Job from a mapping.

    Raises:
        SpecError: With one problem for each unknown, missing or mistyped key.
    """
    try:
        return Job.model_validate(_numbers_from_strings(dict(document), Job))
    except ValidationError as error:
        raise SpecError(*_problems(error)) from None


def _numbers_from_strings(value: Any, annotation: Any) -> Any:
    """Turns "1e-4" and "8" into numbers where the schema asks for a number; leaves all else as it is."""
    if isinstance(value, dict):
        section = _section_of(annotation)
        if section is None:
            return value
        fields = section.model_fields
        return {
            key: _numbers_from_strings(item, fields[key].annotation if key in fields else None)
            for key, item in value.items()
        }
    if isinstance(value, str) and _wants_number(annotation) and _NUMBER.match(text := value.strip()):
        number = float(text)  # exact for every whole number that a key allows
        return int(number) if number.is_integer() else number
    return value


def _members(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) in (Union, UnionType):
        return tuple(inner for member in get_args(annotation) for inner in _members(member))
    if hasattr(annotation, "__metadata__"):
        return _members(get_args(annotation)[0])
    return (annotation,)


def _section_of(annotation: Any) -> type[BaseModel] | None:
    for member in _members(annotation):
        if isinstance(member, type) and issubclass(member, BaseModel):
            return member
    return None


def _wants_number(annotation: Any) -> bool:
    members = [member for member in _members(annotation) if member is not NoneType]
    return any(member in (int, float) for member in members) and str not in members


def _problems(error: ValidationError) -> list[Problem]:
    """Gives one problem a key: the members of a union complain one by one, and a list item by item."""
    details: dict[str, list[Any]] = {}
    for detail in error.errors(include_url=False):
        if detail["type"] == "too_short" and detail["input"]:
            continue  # a list whose items are wrong counts as empty, too
        details.setdefault(_key(detail["loc"]), []).append(detail)
    problems: list[Problem] = []
    for found in details.values():
        # The member whose type fits knows what is wrong with the value; that others take another type is beside it.
        exact = [detail for detail in found if detail["type"] in ("value_error", "too_short")]
        first, *others = map(_problem, exact or found)
        fixes = dict.fromkeys([first.fix, *(f"{other.fix[0].lower()}{other.fix[1:]}" for other in others)])
        distinct = [fix for fix in fixes if fix is first.fix or fix.lower() != first.fix.lower()]
        problems.append(replace(first, fix=", or ".join(distinct)))
    return problems


def _problem(detail: Any) -> Problem:
    key = _key(detail["loc"])
    if detail["type"] == "extra_forbidden":
        return _unknown_key(key, detail["input"])
    if detail["type"] == "missing":
        return Problem(code="KEY_MISSING", key=key, message=f"{key} is missing", fix=f"Add {key}")
    message = _FORMS.get(detail["type"], detail["msg"].removeprefix("Value error, "))
    if key == "model":
        message = "write the model's name, or a section with model.name"
    elif detail["type"] in ("model_type", "dict_type"):
        message = f"write {key} as a section, its keys indented below it"
    given = detail["input"]
    return Problem(
        code="KEY_VALUE",
        key=key,
        message=f"{key}={_shown(given)} ({type(given).__name__}) is not valid",
        fix=message[0].upper() + message[1:],
    )


# What pydantic says of a form, as people who write YAML know it.
_FORMS = {
    "tuple_type": "input should be a list, such as [a, b]",
    "too_short": "give at least one",
    "path_type": "input should be a path",
}


def _key(location: tuple[int | str, ...]) -> str:
    """Gives the dotted path of a pydantic location, without the union members and item numbers that end it."""
    section: type[BaseModel] | None = Job
    parts: list[str] = []
    for part in location:
        parts.append(str(part))
        field = section.model_fields.get(str(part)) if section is not None else None
        section = _section_of(field.annotation) if field is not None else None
        if section is None:
            break
    return ".".join(parts)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "a section"
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def _unknown_key(key: str, value: Any) -> Problem:
    leaf = key.rpartition(".")[2]
    if leaf in FOREIGN_KEYS:
        return Problem(
            code="KEY_FOREIGN",
            key=key,
            message=f"{key}={_shown(value)} is another tool's name",
            fix=f"Here it is {FOREIGN_KEYS[leaf]}",
        )
    known = list(known_keys())
    leaves = {path.rpartition(".")[2]: path for path in known}
    exact = [path for path in known if path.rpartition(".")[2] == leaf]
    near = (
        exact
        or difflib.get_close_matches(key.lower(), known, n=2)
        or [leaves[m] for m in difflib.get_close_matches(leaf.lower(), leaves, n=2)]
    )
    fix = f"Did you mean {' or '.join(near)}" if near else "Remove it; `toolkit validate --keys` lists what there is"
    return Problem(code="KEY_UNKNOWN", key=key, message=f"{key} is not a key of a job", fix=fix)


def known_keys(section: type[BaseModel] = Job, prefix: str = "") -> tuple[str, ...]:
    """Gives the dotted path of every key that a job file may hold."""
    paths: list[str] = []
    for name, field in section.model_fields.items():
        path = f"{prefix}{name}"
        inner = _section_of(field.annotation)
        paths.append(path)
        if inner is not None:
            paths.extend(known_keys(inner, f"{path}."))
    return tuple(paths)


def _siblings(path: Path) -> list[str]:
    try:
        return [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return []
