"""The argument classes of the installed transformers and TRL, read from their source: neither is imported.

Importing transformers' TrainingArguments takes seconds, and torch; its source says each name, annotation and default.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Modules with argument classes, by package; a class inherits the fields of its bases among them.
_MODULES: Mapping[str, tuple[str, ...]] = {
    "transformers": ("training_args.py",),
    "trl": (
        "trainer/base_config.py",
        "trainer/model_config.py",
        "trainer/sft_config.py",
        "trainer/dpo_config.py",
        "trainer/kto_config.py",
        "trainer/reward_config.py",
        "trainer/grpo_config.py",
        "trainer/rloo_config.py",
        "scripts/utils.py",
    ),
}
# TRL is optional: this is what the sources of one version say, for installations without it.
_STORED = Path(__file__).with_name("trl_arguments.json")
# Classes of TRL that its commands parse beside those of a method (trl/scripts/*.py).
TRL_COMMON = ("ScriptArguments", "ModelConfig", "DatasetMixtureConfig")
TRAINER_CLASS = "TrainingArguments"


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """One field of an argument class.

    Args:
        name: Name of the field.
        annotation: Type as the source writes it.
        default: Default where the source has a literal; None otherwise.
        owner: Class that declares it.
        package: Package of that class.
        file: Module of that class.
        takes_none: Whether its metadata lets a command line name it without a value.
    """

    name: str
    annotation: str
    default: Any
    owner: str
    package: str
    file: str
    takes_none: bool = False

    @property
    def type(self) -> str:
        """The plain type of a value on a command line: int, float, bool, str, list, dict, choice or other."""
        parts = [part.strip() for part in self.annotation.strip("\"'").split("|")]
        named = [part for part in parts if part not in ("None", "str", "dict") and not part.startswith("dict[")]
        first = named[0] if named else next((part for part in parts if part != "None"), "str")
        if first.startswith("list"):
            return "list"
        if first.startswith("Literal"):
            return "choice"
        return first if first in ("int", "float", "bool", "str", "dict") else "dict" if first[:4] == "dict" else "other"

    @property
    def choices(self) -> tuple[str, ...]:
        """Values of a Literal."""
        return tuple(re.findall(r"[\"']([^\"']*)[\"']", self.annotation)) if "Literal[" in self.annotation else ()

    @property
    def source(self) -> str:
        """Version, module and class, for messages."""
        return f"{self.package} {package_version(self.package)} {self.file} {self.owner}"


def package_version(name: str) -> str:
    """Return the version of an installed package; that of the stored table for a TRL that is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return str(stored_table()["version"]) if name == "trl" else ""


@cache
def argument_classes() -> Mapping[str, Mapping[str, Argument]]:
    """Return the fields of each argument class, inherited ones included, by name."""
    own: dict[str, tuple[tuple[str, ...], dict[str, Argument]]] = {}
    for package in _MODULES:
        own |= read_package(package) or (_from_table() if package == "trl" else {})
    return {name: _with_bases(name, own) for name in own}


@cache
def argument_names() -> frozenset[str]:
    """Return the names of the fields of all argument classes."""
    return frozenset(name for fields in argument_classes().values() for name in fields)


@cache
def choices_of(enumeration: str) -> tuple[str, ...]:
    """Return the values of an enumeration of transformers, such as SchedulerType; empty if its source has none."""
    folder = _folder("transformers")
    for file in () if folder is None else ("training_args.py", "trainer_utils.py", "debug_utils.py"):
        path = folder / file if folder is not None else Path()
        for node in ast.parse(path.read_text("utf-8")).body if path.is_file() else ():
            if isinstance(node, ast.ClassDef) and node.name == enumeration:
                return tuple(_enumerated(node))
    return ()


@cache
def accelerate_keys() -> tuple[str, ...]:
    """Return the keys of a configuration of Accelerate: the fields of ClusterConfig in its source."""
    folder, found = _folder("accelerate"), dict[str, None]()
    path = folder / "commands" / "config" / "config_args.py" if folder is not None else Path()
    for node in ast.parse(path.read_text("utf-8")).body if path.is_file() else ():
        if isinstance(node, ast.ClassDef) and node.name in ("BaseConfig", "ClusterConfig"):
            found |= {field.name: None for field in _fields(node, "accelerate", "commands/config/config_args.py")}
    return tuple(found)


@cache
def launcher_options(launcher: str) -> frozenset[str]:
    """Return the long options of a launcher, with underscores, as its source declares them; empty if it is not installed."""
    package, file = {
        "accelerate": ("accelerate", "commands/launch.py"),
        "torchrun": ("torch", "distributed/run.py"),
        "deepspeed": ("deepspeed", "launcher/runner.py"),
    }[launcher]
    folder = _folder(package)
    path = folder / file if folder is not None else Path()
    found = re.findall(r"[\"']--([A-Za-z][\w-]*)[\"']", path.read_text("utf-8")) if path.is_file() else []
    return frozenset(name.replace("-", "_") for name in found)


def read_package(package: str) -> dict[str, tuple[tuple[str, ...], dict[str, Argument]]]:
    """Return the bases and own fields of each argument class of an installed package; empty if it is not installed."""
    folder, found = _folder(package), {}
    for file in () if folder is None else _MODULES[package]:
        path = folder / file if folder is not None else Path()
        for node in ast.parse(path.read_text("utf-8")).body if path.is_file() else ():
            if isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(each) for each in node.decorator_list):
                bases = tuple(ast.unparse(base).rpartition(".")[2] for base in node.bases)
                found[node.name] = (bases, {field.name: field for field in _fields(node, package, file)})
    return found


def table_of(package: str) -> dict[str, Any]:
    """Return what `read_package` found as JSON has it, with the version: the content of the stored table."""
    return {
        "version": package_version(package),
        "classes": {
            name: {
                "bases": list(bases),
                "file": next((field.file for field in fields.values()), ""),
                "fields": {key: [field.annotation, field.default] for key, field in fields.items()},
            }
            for name, (bases, fields) in read_package(package).items()
        },
    }


def _folder(package: str) -> Path | None:
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


@cache
def stored_table() -> dict[str, Any]:
    """Return the argument classes of one version of TRL, for installations without it."""
    return dict(json.loads(_STORED.read_text("utf-8")))


def _from_table() -> dict[str, tuple[tuple[str, ...], dict[str, Argument]]]:
    return {
        name: (
            tuple(row["bases"]),
            {
                key: Argument(
                    name=key, annotation=annotation, default=default, owner=name, package="trl", file=row["file"]
                )
                for key, (annotation, default) in row["fields"].items()
            },
        )
        for name, row in stored_table()["classes"].items()
    }


def _with_bases(
    name: str, own: Mapping[str, tuple[tuple[str, ...], Mapping[str, Argument]]], seen: frozenset[str] = frozenset()
) -> dict[str, Argument]:
    bases, fields = own[name]
    found: dict[str, Argument] = {}
    for base in bases:
        if base in own and base not in seen:
            found |= _with_bases(base, own, seen | {name})
    return found | dict(fields)


def _fields(node: ast.ClassDef, package: str, file: str) -> Iterator[Argument]:
    for item in node.body:
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
            continue
        annotation = ast.unparse(item.annotation)
        if item.target.id.startswith("_") or "ClassVar" in annotation or _is_internal(item.value):
            continue
        yield Argument(
            name=item.target.id,
            annotation=annotation,
            default=_default(item.value),
            owner=node.name,
            package=package,
            file=file,
            takes_none=_takes_none(item.value),
        )


def _takes_none(value: ast.expr | None) -> bool:
    """Return whether a field's metadata says `nargs="?"`, as that of gradient_checkpointing does."""
    keywords = value.keywords if isinstance(value, ast.Call) else ()
    metadata = next((word.value for word in keywords if word.arg == "metadata"), None)
    pairs = zip(metadata.keys, metadata.values, strict=True) if isinstance(metadata, ast.Dict) else ()
    return any(key is not None and ast.unparse(key) == "'nargs'" and ast.unparse(each) == "'?'" for key, each in pairs)


def _is_internal(value: ast.expr | None) -> bool:
    """Return whether a field is set by its class and taken from no one (`field(init=False)`)."""
    keywords = value.keywords if isinstance(value, ast.Call) else ()
    return any(word.arg == "init" and ast.unparse(word.value) == "False" for word in keywords)


def _default(value: ast.expr | None) -> Any:
    if isinstance(value, ast.Call):
        value = next((word.value for word in value.keywords if word.arg == "default"), None)
    try:
        return None if value is None else ast.literal_eval(value)
    except ValueError:
        return None


def _enumerated(node: ast.ClassDef) -> Iterator[str]:
    for item in node.body:
        if isinstance(item, ast.Assign) and isinstance(item.value, ast.Constant):
            yield str(item.value.value)
