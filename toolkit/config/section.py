"""The base of every section of a job: frozen, unknown keys refused, errors reported like those of a job file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from pydantic import AliasGenerator, BaseModel, ConfigDict, ValidationError

from toolkit.config.other_names import names_of_field
from toolkit.errors import SpecError


class Section(BaseModel):
    """Base of every section of a job, written in YAML or built in Python.

    Raises:
        SpecError: KEY_UNKNOWN, KEY_OTHER_TOOL, KEY_MISSING or KEY_VALUE for each key that is wrong, whether the section is
            built by its constructor, by `model_validate` or inside another; JOB_FROZEN if an attribute is set later.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        protected_namespaces=(),
        use_attribute_docstrings=True,
        alias_generator=AliasGenerator(validation_alias=names_of_field),
    )

    if not TYPE_CHECKING:  # type checkers know the keys of a section without it

        def __init__(self, /, *positional: Any, **values: Any) -> None:
            with _told_as_problems(type(self), values):
                if positional:
                    raise _by_position(type(self), positional)
                super().__init__(**values)

        # Lets pydantic validate without calling this (pydantic main.py BaseModel.__init__), so that it continues after an
        # invalid section, and all errors of a job are reported together.
        __init__.__pydantic_base_init__ = True

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """Build a section from a mapping; options are pydantic's."""
        with _told_as_problems(cls, obj):
            return super().model_validate(obj, **options)

    def __setattr__(self, name: str, value: Any) -> None:
        with _told_as_problems(type(self), None):
            super().__setattr__(name, value)

    def written(self) -> dict[str, Any]:
        """Return the values that were set in the section, as a mapping that `model_validate` accepts.

        Unchecked values, such as those of `model_copy(update=...)`, are included.
        """
        known = type(self).model_fields
        return {
            name: _copied(value)
            for name, value in vars(self).items()
            if name in self.model_fields_set or name not in known
        }


def _copied(value: Any) -> Any:
    if isinstance(value, Section):
        return value.written()
    if isinstance(value, tuple):
        return tuple(_copied(item) for item in value)
    return {key: _copied(item) for key, item in value.items()} if isinstance(value, dict) else value


@contextmanager
def _told_as_problems(kind: type[Section], given: Any) -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        from toolkit.config.job_problems import problems_of  # which imports the sections

        raise SpecError(*problems_of(error, kind, given)) from None


def _by_position(kind: type[Section], given: tuple[Any, ...]) -> SpecError:
    first, *_ = kind.model_fields
    shown = repr(given[0])
    return SpecError.of(
        code="ARGUMENT",
        key=kind.__name__,
        message=f"{kind.__name__}({shown:.80}) gives a value without its key",
        fix=f"Write {kind.__name__}({first}=...)",
    )
