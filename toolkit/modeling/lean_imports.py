"""Imports of torch and transformers for a process that only traces models: without what a trace never runs.

transformers imports every optional package that it finds, and some of torch's, before it can build one model: quantizers,
Accelerate, DTensor, and torch's compiler, which alone takes longer than a trace. Here it does not find them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

# Packages that transformers imports where they are installed, and that only loading, quantized or adapted models need.
OPTIONAL_PACKAGES = ("accelerate", "bitsandbytes", "deepspeed", "peft", "torchao")

_COMPILER = "torch._dynamo"
_SOURCES = f"{_COMPILER}.source"  # names of values, which fake tensors ask for and read only where shapes are symbols


@contextmanager
def lean_imports() -> Iterator[None]:
    """Hide what a trace does not need from imports inside a `with` block; after it, the packages can be imported as usual.

    What transformers found is fixed for the process, which must not train. Does nothing where transformers is imported already.

    Source:
        transformers utils/import_utils.py _is_package_available, is_torch_distributed_available.
    """
    if "transformers" in sys.modules:
        yield
        return
    hidden = [name for name in OPTIONAL_PACKAGES if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: such a module cannot be imported
    try:
        import torch

        if _COMPILER not in sys.modules:
            _put_off_compiler(torch)
        with _as_if_alone():
            yield
    finally:
        for name in hidden:
            if sys.modules.get(name, name) is None:
                del sys.modules[name]


@contextmanager
def _as_if_alone() -> Iterator[None]:
    """Tell what is imported inside a `with` block that torch.distributed is absent, and read no names of all models.

    `transformers.models` reads all its files for the names of classes, which `transformers` itself has too.

    Source:
        transformers distributed/sharding_utils.py, models/__init__.py.
    """
    from transformers import utils
    from transformers.utils import import_utils

    models = Path(import_utils.__file__).parents[1] / "models" / "__init__.py"
    read = getattr(import_utils, "define_import_structure", None)

    def define(module_path: str, prefix: str | None = None) -> Any:
        assert read is not None, "it takes the place of one"
        return {} if Path(module_path) == models else read(module_path, prefix)

    instead = {"is_torch_distributed_available": lambda: False, "define_import_structure": define}
    before = [
        (module, name, getattr(module, name))
        for module in (utils, import_utils)
        for name in instead
        if hasattr(module, name)
    ]
    for module, name, _ in before:
        setattr(module, name, instead[name])
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def _put_off_compiler(torch: ModuleType) -> None:
    """Put a stand-in of torch's compiler in its place, which imports it when one of its other names is read."""
    spec = find_spec(_COMPILER)
    if spec is None:
        return
    stand_in = _Compiler(spec)
    sys.modules[_COMPILER] = stand_in
    sources = _Sources(_SOURCES)
    sources.__dict__.update(ConstantSource=_Constant, RandomValueSource=_RandomValue)
    sys.modules[_SOURCES] = sources
    torch._dynamo = stand_in  # type: ignore[attr-defined]


class _Compiler(ModuleType):
    """A stand-in of `torch._dynamo` while nothing is compiled: its marks of functions leave them as they are."""

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(_COMPILER)
        self.__spec__, self.__file__ = spec, spec.origin
        self.__path__ = list(spec.submodule_search_locations or ())

    @staticmethod
    def disable(fn: Any = None, recursive: bool = True, **others: Any) -> Any:
        """Return a function as it is, or a decorator that does."""
        return _same if fn is None else fn

    @staticmethod
    def allow_in_graph(fn: Any) -> Any:
        """Return a function as it is."""
        return fn

    @staticmethod
    def assume_constant_result(fn: Any) -> Any:
        """Return a function as it is."""
        return fn

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if f"{_COMPILER}.{name}" in sys.modules:  # one of its own modules, which need not the others
            return sys.modules[f"{_COMPILER}.{name}"]
        return getattr(_import_compiler(), name)


@dataclass(frozen=True, slots=True)
class _Constant:
    """The name of a value that no argument holds."""

    source_name: str


class _RandomValue:
    """The name of a random number; of which there is none."""


class _Sources(ModuleType):
    """A stand-in of the compiler's names of values."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _import_compiler()
        return getattr(importlib.import_module(_SOURCES), name)


def _same(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _import_compiler() -> ModuleType:
    """Import torch's compiler in place of its stand-in."""
    import torch

    if isinstance(sys.modules.get(_COMPILER), _Compiler):
        del sys.modules[_COMPILER]
        if isinstance(sys.modules.get(_SOURCES), _Sources):
            del sys.modules[_SOURCES]
    real = importlib.import_module(_COMPILER)
    for name, module in list(sys.modules.items()):
        parent, _, own = name.rpartition(".")
        if parent == _COMPILER:
            setattr(real, own, module)
    torch._dynamo = real
    return real
