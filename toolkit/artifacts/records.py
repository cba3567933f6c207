"""Dataclasses as data: a JSON document from which only fields of known types are read, so that it can never run code.

A document holds each object once, however often the value refers to it, and fits one schema: the names and types of all
fields below the root. A field of a type that is no data is refused when the schema is made.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import types
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

_PLAIN = (bool, int, float, str, type(None))
_ARRAYS = (tuple, list, Sequence)
_MAPPINGS = (dict, Mapping)


class Records(Generic[T]):
    """The reader and writer of one type.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Point:
    ...     x: int
    ...     name: str | None = None
    >>> points = Records(tuple[Point, ...])
    >>> points.loads(points.dumps((Point(1), Point(2, "b"))))
    (Point(x=1, name=None), Point(x=2, name='b'))

    Args:
        root: Type of the values: a dataclass, or a tuple, list or mapping of data.

    Attributes:
        schema: Hash of the names and types of all fields.

    Raises:
        TypeError: A field has a type that is no data.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._classes: list[type[Any]] = []
        self._fields: dict[type[Any], dict[str, Any]] = {}
        described = [_spelled(root)]
        self._collect(root)
        for found in self._classes:
            fields = ", ".join(f"{name}: {_spelled(hint)}" for name, hint in self._fields[found].items())
            described.append(f"{found.__module__}.{found.__qualname__}({fields})")
        numbers = {found: number for number, found in enumerate(self._classes)}
        self._write = _Writers(numbers, self._fields).of(root)
        self.schema = hashlib.sha256("\n".join(described).encode()).hexdigest()

    def dumps(self, value: T) -> str:
        """Return a value as text.

        Raises:
            TypeError: A field has a value that is not of its type.
        """
        writer = _Writer()
        root = self._write(writer, value)
        return json.dumps([writer.nodes, root], separators=(",", ":"))

    def loads(self, text: str) -> T:
        """Return the value of a text.

        Raises:
            ValueError: The text is not one that `dumps` writes for this schema.
        """
        try:
            nodes, root = json.loads(text)
            made: T = _Reader(nodes, self._classes, self._fields).read(root, self._root)
        except (TypeError, KeyError, IndexError, RecursionError, AttributeError) as error:
            raise ValueError(f"not a record of {_spelled(self._root)}") from error
        return made

    def _collect(self, hint: Any) -> None:
        """Note every dataclass that a type refers to.

        Raises:
            TypeError: The type is no data.
        """
        origin, arguments = get_origin(hint), get_args(hint)
        if origin is Literal:
            if not all(isinstance(value, _PLAIN) for value in arguments):
                raise TypeError(f"{hint} is no data")
        elif origin in (Union, types.UnionType):
            for each in arguments:
                self._collect(each)
        elif origin in _ARRAYS:
            for each in arguments:
                if each is not ...:
                    self._collect(each)
        elif origin in _MAPPINGS:
            if arguments[0] is not str:
                raise TypeError(f"{hint} has keys that are no str")
            self._collect(arguments[1])
        elif isinstance(hint, type) and dataclasses.is_dataclass(hint):
            if hint not in self._fields:
                hints = get_type_hints(hint)
                self._fields[hint] = {field.name: hints[field.name] for field in dataclasses.fields(hint)}
                self._classes.append(hint)
                for each in self._fields[hint].values():
                    self._collect(each)
        elif hint not in _PLAIN:
            raise TypeError(f"{hint} is no data")


def _spelled(hint: Any) -> str:
    """Return the name of a type, the same in every process."""
    if isinstance(hint, type) and not get_args(hint):
        return f"{hint.__module__}.{hint.__qualname__}"
    inner = ", ".join(repr(each) if get_origin(hint) is Literal else _spelled(each) for each in get_args(hint))
    return f"{getattr(get_origin(hint), '__name__', hint)}[{inner}]" if get_args(hint) else repr(hint)


class _Writer:
    """The nodes of a document; `Write` functions add to it."""

    def __init__(self) -> None:
        self.nodes: list[list[Any]] = []
        self._known: dict[int, int] = {}

    def once(self, value: Any, make: Callable[[_Writer, Any], list[Any]]) -> int:
        """Return the number of an object's node, which is made at its first use."""
        number = self._known.get(id(value))
        if number is None:
            node = make(self, value)
            # The root keeps all objects alive: no id is used twice.
            number = self._known[id(value)] = len(self.nodes)
            self.nodes.append(node)
        return number


Write = Callable[[_Writer, Any], Any]


class _Writers:
    """The functions that write values of each type, made once: a value has thousands of the same."""

    def __init__(self, numbers: Mapping[type[Any], int], fields: Mapping[type[Any], Mapping[str, Any]]) -> None:
        self._numbers, self._fields = numbers, fields
        self._records: dict[type[Any], Write] = {}

    def of(self, hint: Any) -> Write:
        """Return the function for a type."""
        origin, arguments = get_origin(hint), get_args(hint)
        if origin in (Union, types.UnionType):
            return self._union(arguments)
        if origin is Literal:
            return partial(_write_literal, arguments)
        if origin in _ARRAYS:
            return self._array(hint, arguments)
        if origin in _MAPPINGS:
            return self._mapping(hint, arguments[1])
        return self._record(hint) if hint in self._fields else partial(_write_plain, hint)

    def _union(self, members: tuple[Any, ...]) -> Write:
        made = {member: self.of(member) for member in members}
        return lambda writer, value: made[_member(value, members)](writer, value)

    def _array(self, hint: Any, arguments: tuple[Any, ...]) -> Write:
        made = [self.of(each) for each in arguments if each is not ...]
        alike = len(arguments) == 1 or (len(arguments) == 2 and arguments[1] is ...)

        def write(writer: _Writer, value: Any) -> list[Any]:
            if not isinstance(value, tuple | list):
                raise TypeError(f"{type(value).__name__} in place of {hint}")
            if alike:
                (one,) = made
                return [one(writer, each) for each in value]
            return [each(writer, part) for part, each in zip(value, made, strict=True)]

        return write

    def _mapping(self, hint: Any, kind: Any) -> Write:
        one = self.of(kind)

        def make(writer: _Writer, value: Any) -> list[Any]:
            return [-1, {key: one(writer, each) for key, each in value.items()}]

        def write(writer: _Writer, value: Any) -> int:
            if not all(type(key) is str for key in value):
                raise TypeError(f"{hint} has keys that are no str")
            return writer.once(value, make)

        return write

    def _record(self, hint: type[Any]) -> Write:
        if hint in self._records:
            return self._records[hint]
        number, fields = self._numbers[hint], list[tuple[str, Write]]()

        def make(writer: _Writer, value: Any) -> list[Any]:
            return [number, *[write(writer, getattr(value, name)) for name, write in fields]]

        def record(writer: _Writer, value: Any) -> int:
            if type(value) is not hint:
                raise TypeError(f"{type(value).__name__} in place of {hint.__name__}")
            return writer.once(value, make)

        self._records[hint] = record  # before its fields, which may refer to it
        fields += [(name, self.of(kind)) for name, kind in self._fields[hint].items()]
        return record


def _write_literal(choices: tuple[Any, ...], writer: _Writer, value: Any) -> Any:
    if not any(value == one and type(value) is type(one) for one in choices):
        raise TypeError(f"{value!r} is not one of {choices}")
    return value


def _write_plain(hint: type[Any], writer: _Writer, value: Any) -> Any:
    if type(value) is not hint and not (hint is float and type(value) is int):
        raise TypeError(f"{value!r} is no {hint.__name__}")
    return value


class _Reader:
    def __init__(
        self, nodes: list[list[Any]], classes: Sequence[type[Any]], fields: Mapping[type[Any], Mapping[str, Any]]
    ) -> None:
        self._nodes, self._classes, self._fields = nodes, classes, fields
        self._made: dict[tuple[int, Any], Any] = {}

    def read(self, given: Any, hint: Any) -> Any:
        if hint in _PLAIN:
            if type(given) is not hint and not (hint is float and type(given) is int):
                raise ValueError(f"{given!r} is no {hint.__name__}")
            return given
        if hint in self._fields:
            return self._object(given, hint)
        origin, arguments = get_origin(hint), get_args(hint)
        if origin in (Union, types.UnionType):
            return self._one_of(given, arguments)
        if origin is Literal:
            if not any(given == one and type(given) is type(one) for one in arguments):
                raise ValueError(f"{given!r} is not one of {arguments}")
            return given
        if origin in _ARRAYS:
            if type(given) is not list:
                raise ValueError(f"{type(given).__name__} in place of {hint}")
            if len(arguments) == 2 and arguments[1] is ... and arguments[0] in self._fields:
                return tuple(self._object(each, arguments[0]) for each in given)
            made = [self.read(each, kind) for each, kind in zip(given, _kinds(arguments, len(given)), strict=True)]
            return made if origin is list else tuple(made)
        return self._mapping(given, hint, arguments[1])

    def _one_of(self, given: Any, members: tuple[Any, ...]) -> Any:
        if given is None and type(None) in members:
            return None
        records = [member for member in members if member in self._fields]
        if records and type(given) is int:
            found = self._classes[self._nodes[given][0]]
            if found not in records:
                raise ValueError(f"{found.__name__} is not one of {members}")
            return self._object(given, found)
        for member in members:
            try:
                return self.read(given, member)
            except (ValueError, TypeError):
                continue
        raise ValueError(f"{given!r} is not one of {members}")

    def _object(self, number: Any, hint: type[Any]) -> Any:
        key = number, hint
        if key not in self._made:
            kind, *values = self._nodes[_index(number)]
            fields = self._fields[hint]
            if type(kind) is not int or kind < 0 or self._classes[kind] is not hint or len(values) != len(fields):
                raise ValueError(f"node {number} is no {hint.__name__}")
            self._made[key] = hint(
                **{name: self.read(value, each) for (name, each), value in zip(fields.items(), values, strict=True)}
            )
        return self._made[key]

    def _mapping(self, number: Any, hint: Any, kind: Any) -> dict[str, Any]:
        key = number, hint
        if key not in self._made:
            tag, values = self._nodes[_index(number)]
            if tag != -1 or type(values) is not dict:
                raise ValueError(f"node {number} is no mapping")
            self._made[key] = {name: self.read(value, kind) for name, value in values.items()}
        return self._made[key]  # type: ignore[no-any-return]


def _index(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} is no number of a node")
    return number


def _kinds(arguments: tuple[Any, ...], length: int) -> Sequence[Any]:
    """Return the type of each element of a tuple or list of some length."""
    if len(arguments) == 1 or (len(arguments) == 2 and arguments[1] is ...):
        return [arguments[0]] * length
    return arguments


def _member(value: Any, members: tuple[Any, ...]) -> Any:
    """Return the member of a union that a value belongs to."""
    for member in members:
        origin = get_origin(member) or member
        if origin is Literal:
            if value in get_args(member):
                return member
        elif type(value) is origin or (origin in (Sequence, Mapping) and isinstance(value, origin)):
            return member
    raise TypeError(f"{type(value).__name__} is not one of {members}")
