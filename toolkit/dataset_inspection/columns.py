"""The layout of a source, determined from its columns, or the columns it lacks."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from toolkit.dataset_inspection.formats import FORMAT_COLUMNS, LABEL_FORMATS, Format, as_format, setting_of
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


def renamed(columns: Iterable[str], names: Mapping[str, str], *, key: str, name: str) -> dict[str, str] | Problem:
    """Return the columns of a source that are kept, each with the name that the job gives it.

    Args:
        columns: Names of the columns.
        names: Value of `columns` of a source: our names, each with the source's.
        key: Key path of the source.
        name: File or hub id, for the message.
    Returns:
        New names by the source's names, without columns whose name another one takes; or DATA_COLUMNS.
    """
    found = tuple(columns)
    if lacking := [theirs for theirs in names.values() if theirs not in found]:
        message = f"{key}.columns names {', '.join(lacking)}, and {name} has the columns {', '.join(found) or 'none'}"
        fix = "Write our name of each column first, then the source's: {prompt: question}"
        return Problem(code="DATA_COLUMNS", key=f"{key}.columns", message=message, fix=fix)
    if len(set(names.values())) < len(names):
        message = f"{key}.columns gives one column of {name} several names: {', '.join(names.values())}"
        return Problem(code="DATA_COLUMNS", key=f"{key}.columns", message=message, fix="Give each column one name")
    ours = {theirs: name for name, theirs in names.items()}
    return {column: ours.get(column, column) for column in found if column in ours or column not in names}


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
    found, setting = tuple(columns), setting_of(key, "format")
    fitting = {layout.format: layout for layout in fitting_layouts(found, wanted)}
    listed = ", ".join(found) or "none"
    if wanted in LABEL_FORMATS and not fitting:
        return _unlabelled(found, as_format(wanted), key=key, name=name)
    if wanted != "auto":
        format_ = as_format(wanted)
        if format_ in fitting:
            return fitting[format_]
        needed = " and ".join(FORMAT_COLUMNS[format_])
        if fitting:
            first = next(iter(fitting))
            message = f"{setting}={wanted} needs the columns {needed}, but {name} has {listed}: that is {first}"
            return Problem(code="DATA_FORMAT", key=setting, message=message, fix=f"Set {setting} to {first}")
    if len(fitting) == 1:
        return next(iter(fitting.values()))
    if fitting:
        message = f"{setting}=auto is ambiguous for {name}: its columns {listed} suit {' and '.join(fitting)}"
        fix = f"Set {setting} to one of {', '.join(fitting)}"
        return Problem(code="DATA_FORMAT", key=setting, message=message, fix=fix)
    accepted = (
        "text; prompt and completion; messages; instruction, input and output (Alpaca); conversations (ShareGPT); or "
        "input_ids"
        if wanted == "auto"
        else needed
    )
    message = f"columns={listed} of {name} have no documents: the columns must be {accepted}"
    fix = _renames(found) or f"Give the columns {accepted}"
    return Problem(code="DATA_COLUMNS", key=key, message=message, fix=fix)


_LABEL_COLUMNS: Mapping[Format, str] = {
    "text_label": "text and label, with text_pair where there are two texts (or sentence; sentence1 and sentence2; premise and "
    "hypothesis)",
    "tokens_tags": "tokens and tags (or ner_tags, or labels)",
}


def _unlabelled(columns: tuple[str, ...], format_: Format, *, key: str, name: str) -> Problem:
    """Return the problem of a source without the columns of a classifier's data."""
    message = f"columns={', '.join(columns) or 'none'} of {name} have no labelled records: they must be {_LABEL_COLUMNS[format_]}"
    fix = "Rename the columns, in the file or with `columns` of data.sources, or set model.task to what the data is for"
    return Problem(code="DATA_COLUMNS", key=key, message=message, fix=fix)


def _renames(columns: tuple[str, ...]) -> str:
    """Return the probable intended name of each column, and what to do with the rest; "" if no name is similar."""
    accepted = [name for format_, names in FORMAT_COLUMNS.items() for name in names if format_ not in LABEL_FORMATS]
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
