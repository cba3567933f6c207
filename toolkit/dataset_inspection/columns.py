"""The layout of a source, determined from its columns, or the columns it lacks."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from toolkit.dataset_inspection.formats import FORMAT_COLUMNS, as_format
from toolkit.dataset_inspection.layouts import Layout, fitting_layouts
from toolkit.errors import Problem

# Names of our columns in other tools.
_SYNONYMS = {
    "content": "text", "document": "text", "body": "text",
    "instruction": "prompt", "question": "prompt", "query": "prompt",
    "response": "completion", "output": "completion", "answer": "completion",
    "conversation": "messages", "chat": "messages", "dialog": "messages",
}  # fmt: skip
_TURNS = 'Each of its items is {"role": "user", "content": "..."}'


def resolve_layout(columns: Iterable[str], wanted: str, *, key: str, name: str) -> Layout | Problem:
    """Return the layout of some columns, or the problem if it is not one of `data.format`.

    Args:
        columns: Names of the columns.
        wanted: Value of `data.format`.
        key: Key path that the problem names.
        name: File or hub id, for the message.
    Returns:
        The layout, or DATA_COLUMNS or DATA_FORMAT.
    """
    found = tuple(columns)
    fitting = {layout.format: layout for layout in fitting_layouts(found, wanted)}
    listed = ", ".join(found) or "none"
    if wanted != "auto":
        format_ = as_format(wanted)
        if format_ in fitting:
            return fitting[format_]
        needed = " and ".join(FORMAT_COLUMNS[format_])
        if fitting:
            first = next(iter(fitting))
            message = f"data.format={wanted} needs the columns {needed}, but {name} has {listed}: that is {first}"
            return Problem(code="DATA_FORMAT", key="data.format", message=message, fix=f"Set data.format to {first}")
    if len(fitting) == 1:
        return next(iter(fitting.values()))
    if fitting:
        message = f"data.format=auto is ambiguous for {name}: its columns {listed} suit {' and '.join(fitting)}"
        fix = f"Set data.format to one of {', '.join(fitting)}"
        return Problem(code="DATA_FORMAT", key="data.format", message=message, fix=fix)
    accepted = (
        "text; prompt and completion; messages; instruction, input and output (Alpaca); or conversations (ShareGPT)"
        if wanted == "auto"
        else needed
    )
    message = f"columns={listed} of {name} have no documents: the columns must be {accepted}"
    fix = _renames(found) or f"Give the columns {accepted}"
    return Problem(code="DATA_COLUMNS", key=key, message=message, fix=fix)


def _renames(columns: tuple[str, ...]) -> str:
    """Return the probable intended name of each column, and what to do with the rest; "" if no name is similar."""
    accepted = [name for names in FORMAT_COLUMNS.values() for name in names]
    meant: dict[str, str] = {}
    for column in columns:
        near = difflib.get_close_matches(column.lower(), accepted, n=1, cutoff=0.75)
        target = near[0] if near else _SYNONYMS.get(column.lower())
        if target is not None and target != column:
            meant.setdefault(target, column)
    if not meant:
        return ""
    renames = "Rename " + ", ".join(f"{column} to {target}" for target, column in meant.items())
    left = [column for column in columns if column.lower() in ("input", "context")]
    if left and "prompt" in meant:
        return f"{renames}, and append {left[0]} to prompt in each record where it is not empty"
    return f"{renames}. {_TURNS}" if "messages" in meant else renames
