"""How DeepSpeed reads the values of its configuration: two kinds of section, and the types of values that it never checks.

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
    """Whether a value is the word "auto"."""
    return isinstance(value, str) and value == "auto"


# What a section of DeepSpeed's own takes.
Count = Annotated[int, Field(ge=0)]
PositiveCount = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]


def _number(value: Any, *, what: str = "a number", accepts: Callable[[Any], bool] = lambda number: True) -> Any:
    if not isinstance(value, int | float) or not accepts(value):
        raise ValueError(f"Input should be {what}")
    return int(value) if isinstance(value, bool) else value


def _index(value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError("Input should be a whole number, without a point") from None


def _whole_number(value: Any) -> int:
    what = "a whole number above 0"
    return int(_number(value, what=what, accepts=lambda number: number > 0 and number % 1 == 0))


def _switch(value: Any) -> bool:
    if not isinstance(value, int):  # it is joined by `|` with another switch (runtime/config.py)
        raise ValueError("Input should be true or false")
    return bool(value)


def _either(value: Any) -> bool:
    if value not in (True, False):
        raise ValueError("Input should be true or false")
    return bool(value)


def _python_int(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, OverflowError):
        raise ValueError("Input should be a whole number") from None


def _given(value: Any) -> Any:
    if value is None:
        raise ValueError("Input should be a section, or left out")
    return value


def _filled(value: Any) -> Any:
    if not value:
        raise ValueError("Input should not be empty")
    return value


def _word(value: Any, *, words: tuple[str, ...], upper: bool) -> str:
    said = (value.upper() if upper else value.lower()) if isinstance(value, str) else None
    if said not in words:
        raise ValueError(f"Input should be one of {', '.join(words)}")
    return said


def one_of(*words: str) -> BeforeValidator:
    """Takes one of some words, in capital or small letters as DeepSpeed does, and makes it the form given here."""
    return BeforeValidator(partial(_word, words=words, upper=words[0].isupper()))


# What DeepSpeed takes as it stands, so the types are those with which its engine works.
Number = Annotated[int | float, BeforeValidator(_number)]
NumberNotZero = Annotated[
    int | float, BeforeValidator(partial(_number, what="a number other than 0", accepts=lambda number: number != 0))
]
PositiveNumber = Annotated[
    int | float,
    BeforeValidator(partial(_number, what="a number above 0", accepts=lambda number: 0 < number < math.inf)),
]
Index = Annotated[int, BeforeValidator(_index)]  # what counts, or goes to C++
Whole = Annotated[int, BeforeValidator(_whole_number)]
Truth = Annotated[bool, BeforeValidator(bool)]  # `if value:`
Switch = Annotated[bool, BeforeValidator(_switch)]
Either = Annotated[bool, BeforeValidator(_either)]
python_int = BeforeValidator(_python_int)  # what `int(value)` makes of it
or_none = BeforeValidator(lambda value: value or None)  # `if value:` before it is used
given = BeforeValidator(_given)  # a section that may be left out, and not null
Text = Annotated[str, BeforeValidator(str)]
Filled = Annotated[Any, BeforeValidator(_filled)]
FolderPath = Annotated[Path, PlainSerializer(str)]

# runtime/config.py DtypeEnum: the name that the toolkit uses, and every one that DeepSpeed takes for it.
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
