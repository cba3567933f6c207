"""What becomes of keys of one tool, for the tests of its table."""

from __future__ import annotations

from typing import Any

from toolkit.migration.draft import Draft
from toolkit.migration.outcomes import Entry, Leaf
from toolkit.migration.reading import Reading, Together
from toolkit.migration.table import Table, flattened


def read(
    table: Table, keys: dict[str, Any], *, draft: Draft | None = None, **together: Any
) -> tuple[Draft, dict[str, Entry]]:
    """Return the job that keys make, and the entry of each."""
    leaves = {
        key: Leaf(key=key, value=value, file="a.yaml", line=at)
        for at, (key, value) in enumerate(flattened(keys, table.keys if table.has_whole else ()), 1)
    }
    draft = Draft() if draft is None else draft
    entries = Reading(table=table, leaves=leaves, draft=draft, together=Together(**together)).run()
    return draft, {entry.leaf.key: entry for entry in entries}


def values(table: Table, keys: dict[str, Any], *wanted: str, **together: Any) -> list[Any]:
    """Return values of the job that keys make."""
    draft, _ = read(table, keys, **together)
    return [draft.get(key) for key in wanted]


def outcome(table: Table, key: str, keys: dict[str, Any], **together: Any) -> str:
    """Return what became of one key."""
    return read(table, keys, **together)[1][key].outcome
