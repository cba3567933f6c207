"""The three document formats: the columns of each, and the checks of its records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from toolkit.errors import Problem

Format = Literal["text", "prompt_completion", "messages"]
FORMAT_COLUMNS: dict[Format, tuple[str, ...]] = {
    "text": ("text",),
    "prompt_completion": ("prompt", "completion"),
    "messages": ("messages",),
}
# A message that calls a tool may have no content.
_CALLS = ("tool_calls", "function_call")
LOSS_ON_FORMAT: dict[str, Format] = {"completion": "prompt_completion", "assistant": "messages"}


def as_format(name: str) -> Format:
    """Narrow a string to the type `Format`."""
    return next(format_ for format_ in get_args(Format) if format_ == name)


def record_fault(record: Mapping[str, Any], format_: Format) -> str | None:
    """Return why a record is not a valid document of this format; None if it is."""
    if format_ == "messages":
        return _messages_fault(record.get("messages"))
    for column in FORMAT_COLUMNS[format_]:
        if not isinstance(value := record.get(column), str):
            return f"{column} is {kind_of(value)}, not a string"
    return None


def loss_on_problem(loss_on: str, format_: Format) -> Problem | None:
    """Return the problem DATA_LOSS_ON if the format has no tokens of the kind that `data.loss_on` names."""
    needed = LOSS_ON_FORMAT.get(loss_on, format_)
    if needed == format_:
        return None
    allowed = "all" + "".join(f" or {name}" for name, of in LOSS_ON_FORMAT.items() if of == format_)
    message = f"data.loss_on={loss_on} needs the format {needed}, but the data is {format_}"
    return Problem(code="DATA_LOSS_ON", key="data.loss_on", message=message, fix=f"Set data.loss_on to {allowed}")


def _messages_fault(messages: Any) -> str | None:
    if not isinstance(messages, list):
        return f"messages is {kind_of(messages)}, not a list of {{role, content}}"
    if not messages:
        return "messages is an empty list"
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            return f"messages[{index}] is {kind_of(message)}, not an object with role and content"
        if not isinstance(message.get("role"), str):
            return f"messages[{index}].role is {kind_of(message.get('role'))}, not a string"
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and any(map(message.get, _CALLS))):
            return f"messages[{index}].content is {kind_of(content)}, not a string"
    return None


def kind_of(value: Any, *, null: str = "absent or null") -> str:
    """Return the type of a JSON value in words; `null` is the text for None."""
    if value is None:
        return null
    names = {
        bool: "true or false",
        int: "a number",
        float: "a number",
        list: "a list",
        dict: "an object",
        str: "a string",
    }
    return names.get(type(value), f"a {type(value).__name__}")
