"""The three document formats: which columns make one, and what a record of each must look like."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

from toolkit.errors import Problem

Format = Literal["text", "prompt_completion", "messages"]
FORMAT_COLUMNS: dict[Format, tuple[str, ...]] = {
    "text": ("text",),
    "prompt_completion": ("prompt", "completion"),
    "messages": ("messages",),
}
LOSS_ON_FORMAT: dict[str, Format] = {"completion": "prompt_completion", "assistant": "messages"}

# Names that other tools give to our columns.
_SYNONYMS = {
    "content": "text", "document": "text", "body": "text",
    "instruction": "prompt", "question": "prompt", "query": "prompt", "input": "prompt",
    "response": "completion", "output": "completion", "answer": "completion",
    "conversations": "messages", "conversation": "messages", "chat": "messages", "dialog": "messages",
}  # fmt: skip


def as_format(name: str) -> Format:
    """Narrows a string to the format that it names."""
    return next(format_ for format_ in get_args(Format) if format_ == name)


def resolve_format(columns: Iterable[str], wanted: str, *, key: str, name: str) -> Format | Problem:
    """Reads the format off the columns, or says why it cannot be what `data.format` asks.

    Args:
        columns: Names found.
        wanted: `data.format`.
        key: Key path that the problem names.
        name: File or hub id, for the message.
    Returns:
        The format; or DATA_COLUMNS, DATA_FORMAT.
    """
    found = tuple(columns)
    fitting = [format_ for format_, needed in FORMAT_COLUMNS.items() if set(needed) <= set(found)]
    listed = ", ".join(found) or "none"
    if wanted != "auto":
        if wanted in fitting:
            return fitting[fitting.index(wanted)]
        needed = " and ".join(FORMAT_COLUMNS[as_format(wanted)])
        if fitting:
            message = f"data.format={wanted} needs the columns {needed}, but {name} has {listed}: that is {fitting[0]}"
            return Problem(
                code="DATA_FORMAT", key="data.format", message=message, fix=f"Set data.format to {fitting[0]}"
            )
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        message = f"data.format=auto is ambiguous for {name}: its columns {listed} suit {' and '.join(fitting)}"
        fix = f"Set data.format to one of {', '.join(fitting)}"
        return Problem(code="DATA_FORMAT", key="data.format", message=message, fix=fix)
    accepted = "text; prompt and completion; or messages" if wanted == "auto" else needed
    message = f"columns={listed} of {name} hold no documents: needed are {accepted}"
    fix = _renames(found) or f"Give the columns {accepted}"
    return Problem(code="DATA_COLUMNS", key=key, message=message, fix=fix)


def record_fault(record: Mapping[str, Any], format_: Format) -> str | None:
    """Says what keeps one record from being a document of this format; None when nothing does."""
    if format_ == "messages":
        return _messages_fault(record.get("messages"))
    for column in FORMAT_COLUMNS[format_]:
        if not isinstance(value := record.get(column), str):
            return f"{column} is {kind_of(value)}, not a string"
    return None


def loss_on_problem(loss_on: str, format_: Format) -> Problem | None:
    """Gives DATA_LOSS_ON when the format has no tokens of the kind that `data.loss_on` names."""
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
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            return f"messages[{index}].content is {kind_of(content)}, not a string"
    return None


def kind_of(value: Any, *, null: str = "absent or null") -> str:
    """Says in words what a JSON value is; `null` stands for None."""
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


def _renames(columns: tuple[str, ...]) -> str:
    """Names the accepted column that each found one was probably meant to be; "" when none is near."""
    accepted = [name for names in FORMAT_COLUMNS.values() for name in names]
    meant: dict[str, str] = {}
    for column in columns:
        near = difflib.get_close_matches(column.lower(), accepted, n=1, cutoff=0.75)
        target = near[0] if near else _SYNONYMS.get(column.lower())
        if target is not None and target != column:
            meant.setdefault(target, column)
    return "" if not meant else "Rename " + ", ".join(f"{column} to {target}" for target, column in meant.items())
