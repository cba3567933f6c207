"""Proofs of this process and of earlier ones: a twin runs once for a configuration, a way to split it and the code that does so."""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import toolkit
from toolkit.artifacts.record_cache import RecordCache
from toolkit.artifacts.records import Records
from toolkit.launch.user_cache import user_cache_folder
from toolkit.version import version_of

T = TypeVar("T")

# Folders of the toolkit on whose code a proof depends.
_OWN_CODE = ("twins", "tensor_parallel", "pipeline_parallel", "context_parallel", "distributed")
# Modules of other folders that have such code.
_OWN_MODULES = ("modeling/tiled_mlp.py",)
# Values of a configuration that no module depends on.
_APART = ("use_cache", "dtype", "torch_dtype", "_name_or_path", "transformers_version", "architectures")

_known: dict[str, Any] = {}


def kept_proof(
    kind: str, model_class: type[Any], config: Any, *others: Hashable, records: Records[T], make: Callable[[], T]
) -> T:
    """Return the proof of a split, made now or read from what an earlier process kept.

    Args:
        kind: Kind of split.
        model_class: Class of the model; the source of its package is part of the key, since remote code may change.
        config: Its configuration.
        others: What else the proof depends on.
        records: How proofs are stored.
        make: Makes the proof.
    """
    key = proof_key(kind, model_class, config, *others)
    if key in _known:
        found: T = _known[key]
        return found
    folder = user_cache_folder()
    stored = None if folder is None else RecordCache(folder / "proofs")
    proof = None if stored is None else stored.get(key, records)
    if proof is None:
        proof = make()
        if stored is not None:
            stored.put(key, proof, records)
    _known[key] = proof
    return proof


def proof_key(kind: str, model_class: type[Any], config: Any, *others: Hashable) -> str:
    """Return a hash of all that a proof depends on."""
    values = {
        name: value for name, value in json.loads(config.to_json_string(use_diff=False)).items() if name not in _APART
    }
    spelled = json.dumps(values, sort_keys=True, default=str)
    parts = [
        kind,
        model_class.__qualname__,
        _source(inspect.getmodule(model_class)),
        spelled,
        *map(repr, others),
        _versions(),
    ]
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogatepass")).hexdigest()


@cache
def _source(module: ModuleType | None) -> str:
    """Return a hash of the file of a module and of those that it may import from its package, its repository or its folder."""
    file = getattr(module, "__file__", None)
    if module is None or file is None:
        return ""
    folder, files = Path(file).parent, Path(file).parent.glob("*.py")
    top, *inner = module.__name__.split(".")
    if top == "transformers_modules":  # remote code: a folder for each commit
        files = folder.rglob("*.py")
    elif inner and top != "transformers":  # whose version is part of the key
        root = next((parent for parent in Path(file).parents[: len(inner) + 1] if parent.name == top), None)
        files = files if root is None else root.rglob("*.py")
    digest = hashlib.sha256()
    for path in sorted(files):
        with suppress(OSError):
            text = path.read_bytes()
            digest.update(f"{path.name} {len(text)}\n".encode() + text)
    return digest.hexdigest()


@cache
def _versions() -> str:
    root = Path(toolkit.__file__).parent
    found = [sys.version, *(f"{name} {version_of(name)}" for name in ("torch", "transformers"))]
    paths = [root / name for name in _OWN_MODULES]
    for name in _OWN_CODE:
        paths += sorted((root / name).rglob("*.py"))
    for path in paths:
        stat = path.stat()
        found.append(f"{path.relative_to(root)} {stat.st_size} {stat.st_mtime_ns}")
    return "\n".join(found)
