"""How DeepSpeed reads the values of its configuration: two kinds of section, and types for values that it never checks.

Sources: deepspeed 0.19.8 runtime/config_utils.py DeepSpeedConfigModel; runtime/config.py.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, model_validator


class Section(BaseModel):
    """A section that DeepSpeed checks: an unknown key is refused, "auto" counts as left out, "5" and 5.0 are 5."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_enum_values=True,
        populate_by_name=True,
        protected_namespaces=(),
        defer_build=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_auto(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        return {key: value for key, value in values.items() if not is_auto(value)}


class LooseSection(BaseModel):
    """A section whose keys DeepSpeed looks up one by one: an unknown key is ignored, and no value is converted."""

    model_config = ConfigDict(extra="ignore", frozen=True, protected_namespaces=(), defer_build=True)


def is_auto(value: Any) -> bool:
    """Return whether a value is the word "auto"."""
    return isinstance(value, str) and value == "auto"


# Values that a section which DeepSpeed checks accepts.
Count = Annotated[int, Field(ge=0)]
PositiveCount = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]


def _takes(
    what: str, accepts: Callable[[Any], bool], make: Callable[[Any], Any] = lambda value: value
) -> BeforeValidator:
    """Refuse what DeepSpeed does not accept, with what is expected, and convert the rest as DeepSpeed does."""

    def read(value: Any) -> Any:
        if not accepts(value):
            raise ValueError(f"Input should {what}")
        return make(value)

    return BeforeValidator(read)


def _number(
    what: str,
    accepts: Callable[[Any], bool] = lambda number: True,
    make: Callable[[Any], Any] = lambda number: int(number) if isinstance(number, bool) else number,
) -> BeforeValidator:
    return _takes(what, lambda value: isinstance(value, int | float) and accepts(value), make)


def _python_int(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, OverflowError):
        raise ValueError("Input should be a whole number") from None


def _word(value: Any, *, words: tuple[str, ...], upper: bool) -> str:
    said = (value.upper() if upper else value.lower()) if isinstance(value, str) else None
    if said not in words:
        raise ValueError(f"Input should be one of {', '.join(words)}")
    return said


def one_of(*words: str) -> BeforeValidator:
    """Accept one of some words, in upper or lower case as DeepSpeed does, and convert it to the case given here."""
    return BeforeValidator(partial(_word, words=words, upper=words[0].isupper()))


# Values that DeepSpeed uses unchecked, so the types are those with which its engine works.
Number = Annotated[int | float, _number("be a number")]
NumberNotZero = Annotated[int | float, _number("be a number other than 0", lambda number: number != 0)]
PositiveNumber = Annotated[int | float, _number("be a number above 0", lambda number: 0 < number < math.inf)]
Whole = Annotated[int, _number("be a whole number above 0", lambda number: number > 0 and number % 1 == 0, int)]
# Counts, and values passed to C++.
Index = Annotated[
    int, _takes("be a whole number, without a point", lambda value: hasattr(value, "__index__"), operator.index)
]
Truth = Annotated[bool, BeforeValidator(bool)]  # `if value:`
# Combined by `|` with another switch (runtime/config.py).
Switch = Annotated[bool, _takes("be true or false", lambda value: isinstance(value, int), bool)]
Either = Annotated[bool, _takes("be true or false", lambda value: value in (True, False), bool)]
python_int = BeforeValidator(_python_int)  # converted by `int(value)`
or_none = BeforeValidator(lambda value: value or None)  # `if value:` before it is used
given = _takes("be a section, or left out", lambda value: value is not None)
Text = Annotated[str, BeforeValidator(str)]
Filled = Annotated[Any, _takes("not be empty", bool)]
FolderPath = Annotated[Path, PlainSerializer(str)]

# runtime/config.py DtypeEnum: the name that the toolkit uses, and every name that DeepSpeed accepts for it.
_DTYPES: Mapping[str, tuple[str, ...]] = {
    "fp16": ("fp16", "torch.float16", "float16", "half"),
    "fp32": ("fp32", "torch.float32", "float32", "float"),
    "bf16": ("bf16", "torch.bfloat16", "bfloat16"),
    "int8": ("int8", "torch.int8"),
}


def _dtype(value: Any) -> str:
    for name, spellings in _DTYPES.items():
        if value in spellings:
            return name
    raise ValueError(f"Input should be one of {', '.join(_DTYPES)}")


known_dtype = BeforeValidator(_dtype)
Dtype = Annotated[str, known_dtype]
