"""Stand-ins of modules that a trace of plain sizes asks for and does not need: sympy, symbolic shapes, torch's compiler, DTensor.

Each takes the place of its module in `sys.modules`, answers what is asked of it where no size is a symbol, and imports the
real one when any other of its names is read. A symbol cannot be made without the real modules.
"""

from __future__ import annotations

import functools
import importlib
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"
_SOURCES = f"{_COMPILER}.source"  # names of values, which fake tensors ask for and read only where shapes are symbols
_SYMBOLS = "torch.fx.experimental.symbolic_shapes"
_DTENSOR = "torch.distributed.tensor"
_SYMPY = "sympy"
_FUNCTIONS = "torch.utils._sympy.functions"


class StandIn(ModuleType):
    """A module that stands in for another until a name is read that it does not have.

    Args:
        name: Name of the module.
        known: Its names that a trace asks for.
    """

    def __init__(self, name: str, known: Mapping[str, Any]) -> None:
        super().__init__(name)
        package, _, _ = name.rpartition(".")
        paths = getattr(sys.modules.get(package), "__path__", None)  # of the package, without importing it
        self.__spec__ = spec = PathFinder.find_spec(name, paths)
        if spec is not None:
            self.__file__ = spec.origin
            if spec.submodule_search_locations is not None:
                self.__path__ = list(spec.submodule_search_locations)  # its own modules are imported without it
        self.__dict__.update(known)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if f"{self.__name__}.{name}" in sys.modules:  # one of its own modules, which need not the others
            return sys.modules[f"{self.__name__}.{name}"]
        return getattr(restore(self.__name__), name)


def install() -> None:
    """Put the stand-ins in the place of what is not imported yet; torch is."""
    import torch

    for name, known in (
        (_SYMPY, dict.fromkeys(("Basic", "Expr", "Float", "Integer", "Symbol"), _Symbol)),
        (_FUNCTIONS, {"Max": max}),
        (_SYMBOLS, _symbols()),
        (_DTENSOR, {"DTensor": _DTensor}),
        (_COMPILER, {"disable": _disable, "allow_in_graph": _same, "assume_constant_result": _same}),
        (_SOURCES, {"ConstantSource": _Constant, "RandomValueSource": _RandomValue}),
    ):
        if name in sys.modules or (name == _SOURCES and not isinstance(sys.modules.get(_COMPILER), StandIn)):
            continue
        sys.modules[name] = StandIn(name, known)
        if name == _COMPILER:
            torch._dynamo = sys.modules[name]


def restore(name: str) -> ModuleType:
    """Import a module in place of its stand-in, and what it builds on in place of theirs."""
    if name == _SOURCES:  # its package replaces it
        restore(_COMPILER)
        return importlib.import_module(_SOURCES)
    for each in {_FUNCTIONS: (_SYMPY,), _SYMBOLS: (_SYMPY, _FUNCTIONS), _COMPILER: (_SYMBOLS, _DTENSOR)}.get(name, ()):
        if isinstance(sys.modules.get(each), StandIn):
            restore(each)
    for each in (name, _SOURCES) if name == _COMPILER else (name,):
        if isinstance(sys.modules.get(each), StandIn):
            del sys.modules[each]
    real = importlib.import_module(name)
    for path, module in list(sys.modules.items()):
        parent, _, own = path.rpartition(".")
        if parent == name:
            setattr(real, own, module)
    parent, _, own = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], own, real)
    return real


@dataclass(frozen=True, slots=True)
class _Constant:
    """The name of a value that no argument holds."""

    source_name: str


class _RandomValue:
    """The name of a random number; of which there is none."""


class _Symbol:
    """The class of a symbol or an expression of symbols, of which there is none."""


class _DTensor:
    """The class of a sharded tensor, of which there is none."""


class _DataDependentError(RuntimeError):
    """The error of a symbol without a value, of which there is none."""


def _same(function: Any) -> Any:
    return function


def _disable(fn: Callable[..., Any] | None = None, recursive: bool = True, **others: Any) -> Any:
    """Return a function as it is, or a decorator that does: nothing is compiled."""
    return _same if fn is None else fn


def _symbols() -> dict[str, Any]:
    """Return what torch's functions about symbols answer for numbers and tensors without any.

    Source:
        torch/fx/experimental/symbolic_shapes.py: what each does with what is neither SymInt nor SymBool.
    """
    truth = dict.fromkeys(
        ("expect_true", "guard_or_false", "guard_or_true", "statically_known_true", "guard_size_oblivious"), _truth
    )
    nothing = dict.fromkeys(("has_free_symbols", "has_free_unbacked_symbols", "is_nested_int", "is_symbolic"), _no)
    values = dict.fromkeys(
        ("guard_bool", "guard_float", "guard_int", "guard_scalar", "guarding_hint_or_throw", "optimization_hint"),
        _value,
    )
    always = dict.fromkeys(("has_guarding_hint", "has_static_value", "is_concrete_bool", "is_concrete_int"), _yes)
    return {
        **truth,
        **nothing,
        **values,
        **always,
        "GuardOnDataDependentSymNode": _DataDependentError,
        "free_unbacked_symbols": lambda value: frozenset(),
        "compute_unbacked_bindings": lambda shape_env, *values, **options: None,
        "sym_and": lambda *values: functools.reduce(operator.and_, values),
        "sym_or": lambda *values: functools.reduce(operator.or_, values),
        "sym_eq": _equal,
        "_iterate_exprs": _none,
        "_iterate_nodes": _none,
    }


def _truth(value: bool, skip: int = 0) -> bool:
    if not isinstance(value, bool):
        raise AssertionError(f"{type(value).__name__} in place of a bool")
    return value


def _value(value: Any, *otherwise: Any) -> Any:
    return value


def _yes(value: Any) -> bool:
    return True


def _no(value: Any) -> bool:
    return False


def _none(value: Any) -> Iterator[Any]:
    return iter(())


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)
