"""Errors of Horovod's interface, each also of the class that Horovod raises, so that a script's own `except` still works."""

from __future__ import annotations

from typing import NoReturn

from toolkit.errors import Problem, RunError, SpecError

DOCS = "docs/horovod.md"


class HorovodInternalError(RunError, RuntimeError):
    """An operation failed on the ranks that take part in it: they disagree about it, one of them has left, or torch failed."""


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818 - Horovod's name
    """A script's own way to say that hosts have changed; `elastic.run` synchronises the state and goes on.

    Args:
        skip_sync: Whether `elastic.run` leaves out the synchronisation.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("hosts have changed")
        self.skip_sync = skip_sync


class HorovodValueError(SpecError, ValueError):
    """An argument of a Horovod function has a value that cannot be used."""


class HorovodTypeError(SpecError, TypeError):
    """An argument of a Horovod function is of a type that cannot be used."""


class HorovodOrderError(RunError, AssertionError):
    """The optimizer's methods were called in an order that would lose gradients."""


class NotBuiltError(SpecError, NotImplementedError):
    """A part of Horovod that is not built here was called."""


class NotBuiltAttributeError(SpecError, AttributeError):
    """A name of Horovod that is not built here was looked up."""


class NotBuiltImportError(SpecError, ImportError):
    """A module of Horovod that is not built here was imported."""


def not_built(name: str, fix: str) -> Problem:
    """Return the problem that a part of Horovod is not built here."""
    return Problem(
        code="HOROVOD_NOT_BUILT", key=name, message=f"{name} is a part of Horovod that is not built here", fix=fix
    )


def refuse_type(name: str, value: object, wanted: str, fix: str) -> NoReturn:
    """Raise HOROVOD_ARGUMENT.

    Raises:
        HorovodTypeError: Always.
    """
    message = f"{name}={value!r:.80} is of type {type(value).__name__}, not {wanted}"
    raise HorovodTypeError.of(code="HOROVOD_ARGUMENT", key=name, message=message, fix=fix)


def refuse_value(name: str, message: str, fix: str) -> NoReturn:
    """Raise HOROVOD_ARGUMENT.

    Raises:
        HorovodValueError: Always.
    """
    raise HorovodValueError.of(code="HOROVOD_ARGUMENT", key=name, message=message, fix=fix)
