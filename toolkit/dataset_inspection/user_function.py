"""A function of the user's that changes records (`data.preprocess`), applied to one of them; needs no `datasets`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from typing import Any

from toolkit.config.user_code import imported, unfound
from toolkit.dataset_inspection.files import Head
from toolkit.errors import DataError, first_line

PREPROCESS = "data.preprocess"


def head_of(head: Head, name: str, *, source: str) -> Head | None:
    """Return what a function of the user's makes of the first record that it keeps; None if it keeps none, or is not found.

    Args:
        head: First records of a source.
        name: The function as `module:function`.
        source: Name of the source, for errors.
    Raises:
        SpecError: USER_CODE. DataError: DATA_PREPROCESS.
    """
    if list(unfound(PREPROCESS, name)):  # an error of its own
        return None
    with redirect_stdout(sys.stderr):  # standard output may be JSON alone
        function = imported(PREPROCESS, name)
        for line, record in head.records:
            whole = {column: record.get(column) for column in head.columns}
            made = applied(function, name, whole, lambda line=line: f"{source}, record at line {line}")  # type: ignore[misc]
            if made is not None:
                return replace(head, columns=tuple(made), records=((line, made),))
    return None


def applied(
    function: Callable[..., Any], name: str, record: Mapping[str, Any], place: Callable[[], str]
) -> dict[str, Any] | None:
    """Return what a function of the user's makes of a record, as JSON holds it, or None to leave it out.

    Args:
        function: The function.
        name: Its name, for errors.
        record: The record.
        place: Returns where it is, for errors.
    Raises:
        DataError: DATA_PREPROCESS.
    """
    try:
        made = function(dict(record))
    except (Exception, SystemExit) as error:  # the function is the user's
        what = f"{type(error).__name__}: {first_line(error)}"
        raise refused(name, f"it fails at {place()}: {what}") from error
    if made is None:
        return None
    try:
        if not isinstance(made, Mapping):
            raise TypeError(f"{type(made).__name__} is neither a dict nor None")
        kept: dict[str, Any] = json.loads(json.dumps(dict(made)))
    except (TypeError, ValueError, RecursionError) as error:
        raise refused(name, f"what it returns for {place()} cannot be read: {first_line(error)}") from error
    return kept


def refused(name: str, what: str) -> DataError:
    """Return the error of a function whose records cannot be read."""
    fix = "Return a dict of text, numbers, lists and dicts with the same keys for each record, or None to leave it out"
    return DataError.of(code="DATA_PREPROCESS", key=PREPROCESS, message=f"{PREPROCESS}={name}: {what}", fix=fix)
