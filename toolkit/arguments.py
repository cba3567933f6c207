"""Checks of the arguments of public functions against their type hints; a wrong one is a `SpecError`."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from toolkit.errors import Problem, SpecError, raise_all

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class AtLeast:
    """Smallest value that an argument may have, next to its type in an Annotated hint."""

    value: int


@dataclass(frozen=True, slots=True)
class AtMost:
    """Largest value that an argument may have, next to its type in an Annotated hint."""

    value: int


Positive = Annotated[int, AtLeast(1)]
NotNegative = Annotated[int, AtLeast(0)]

# Longest excerpt of a wrong value that an error repeats, characters.
_SHOWN_CHARACTERS = 80
_NAMES = {type(None): "None", bool: "True or False", int: "an int", float: "a number", str: "a str"}
# Collections that exclude str, a collection of characters, and mappings, collections of keys.
_COLLECTIONS: dict[Any, str] = {Sequence: "a list", Iterable: "a list", list: "a list", tuple: "a tuple"}


def checks_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function check its arguments against its type hints before it runs.

    For a hint with Path, a str or Path must be one that a file system supports.

    Raises:
        SpecError: ARGUMENT for each wrong argument, with its name, its type and what is expected.
    """
    signature = inspect.signature(function)

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return function(*args, **kwargs)  # Python's own TypeError names what is missing or unknown
        raise_all(SpecError, _problems(function, signature, given))
        return function(*args, **kwargs)

    return checked


def each_fitting(function: Callable[..., Any], name: str, values: Iterable[R]) -> Iterator[R]:
    """Yield the members of an argument that can be iterated only once, each checked against the function's hint.

    Raises:
        SpecError: ARGUMENT, at the first member that does not fit, or if the argument is not iterable.
    """
    hint = _hints(function)[name]
    try:
        members = iter(values)
    except TypeError:  # a 0-d tensor has __iter__, too
        raise SpecError(_wrong(function, name, values, f"Give {_described(hint)}")) from None
    for member in members:
        if not _fits(member, get_args(hint)[0]):
            raise SpecError(_wrong(function, name, member, f"Give {_described(hint)}"))
        yield member


def shown(value: object) -> str:
    """Return the beginning of a value's repr, or its type if repr fails."""
    try:
        text = repr(value)
    except Exception:  # the repr of a user's class may raise anything
        text = f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def _problems(
    function: Callable[..., Any], signature: inspect.Signature, given: Mapping[str, Any]
) -> Iterator[Problem]:
    hints = _hints(function)
    for name, value in given.items():
        if name not in hints:
            continue
        kind, hint = signature.parameters[name].kind, hints[name]
        values: Iterable[tuple[str, Any]] = [(name, value)]
        if kind is inspect.Parameter.VAR_POSITIONAL:
            values = [(name, each) for each in value]
        elif kind is inspect.Parameter.VAR_KEYWORD:
            values = value.items()
        for key, each in values:
            if not _fits(each, hint):
                yield _wrong(function, key, each, f"Give {_described(hint)}")
            elif Path in _members(hint) and (fault := _path_fault(each)):
                yield _wrong(function, key, each, fault)


def _wrong(function: Callable[..., Any], name: str, value: Any, fix: str) -> Problem:
    return Problem(
        code="ARGUMENT",
        key=name,
        message=f"{function.__qualname__} cannot take {name}={shown(value)} ({type(value).__name__})",
        fix=fix,
    )


@cache
def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    return get_type_hints(function, include_extras=True)


def _fits(value: Any, hint: Any) -> bool:
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any or isinstance(hint, TypeVar):
        return True
    if origin is Annotated:
        return _fits(value, inner[0]) and all(_is_within(value, bound) for bound in inner[1:])
    if origin in (Union, types.UnionType):
        return any(_fits(value, member) for member in inner)
    if origin is Literal:
        return any(type(value) is type(member) and value == member for member in inner)
    if origin in _COLLECTIONS:
        return isinstance(value, origin) and not isinstance(value, str | bytes | Mapping) and _all_fit(value, inner)
    if origin is not None:
        matches = isinstance(value, origin)
        return matches and (origin is not Mapping or _entries_fit(value, *inner))
    if hint in (int, float):
        wanted: Any = int if hint is int else int | float
        return isinstance(value, wanted) and not isinstance(value, bool)
    return isinstance(value, hint)


def _is_within(value: Any, bound: Any) -> bool:
    if isinstance(bound, AtMost):
        return bool(value <= bound.value)
    return not isinstance(bound, AtLeast) or bool(value >= bound.value)


def _entries_fit(value: Mapping[Any, Any], key_hint: Any, value_hint: Any) -> bool:
    return all(_fits(key, key_hint) and _fits(each, value_hint) for key, each in value.items())


def _all_fit(value: Any, inner: tuple[Any, ...]) -> bool:
    if not isinstance(value, Sequence):
        return True  # an iterator, which must not be consumed here
    return all(_fits(each, inner[0]) for each in value)


def _described(hint: Any) -> str:
    """Return what a hint accepts, in words: "a Job, a Plan or a path (str or Path)"."""
    members = _members(hint)
    if Path in members and str in members:
        members = [member for member in members if member not in (str, Path)]
        words = ["a path (str or Path)"]
    else:
        words = []
    words = [*(_word(member) for member in members if member is not type(None)), *words]
    if type(None) in members:
        words.append("None")
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _word(hint: Any) -> str:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        least = [f"at least {bound.value}" for bound in inner[1:] if isinstance(bound, AtLeast)]
        most = [f"at most {bound.value}" for bound in inner[1:] if isinstance(bound, AtMost)]
        return _word(inner[0]) + (f" of {' and '.join((*least, *most))}" if least or most else "")
    if origin is Literal:
        return f"one of {', '.join(map(repr, inner))}"
    if origin in _COLLECTIONS:
        return f"{_COLLECTIONS[origin]} (each member {_described(inner[0])})"
    if origin is Mapping or origin is dict:
        return "a dict"
    if origin is not None:
        return "a function"
    name = hint.__name__
    return _NAMES.get(hint) or f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def _members(hint: Any) -> list[Any]:
    return list(get_args(hint)) if get_origin(hint) in (Union, types.UnionType) else [hint]


def _path_fault(value: Any) -> str:
    if not isinstance(value, str | Path):
        return ""
    text = str(value)
    if not text:
        return "Name a file or folder: it is empty"
    if "\0" in text:
        return "Take the zero byte out of the path"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "Write the path in UTF-8"
    return ""
