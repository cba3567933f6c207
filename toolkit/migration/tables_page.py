"""The tables of docs/migrate.md, made from the tables by which files are migrated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from toolkit.migration.detection import TABLES
from toolkit.migration.launcher import LAUNCHER
from toolkit.migration.table import Row, Subject, Table
from toolkit.migration.trainer import TRAINER

# What stands above the tables on the page; a test compares what is below with `tables_text()`.
MARK = "<!-- From here on made by toolkit.migration.tables_page.tables_text(). -->"


def tables_text() -> str:
    """Return the tables of all tools as Markdown."""
    return "\n".join(line for table in (*TABLES, LAUNCHER) for line in _of_tool(table)) + "\n"


def _of_tool(table: Table) -> Iterator[str]:
    own = table.rows if table is TRAINER else tuple(row for row in table.rows if row not in TRAINER.rows)
    shared = (
        ""
        if table is TRAINER or len(own) == len(table.rows)
        else " Trainer's keys that are not named here are as in its own table."
    )
    yield f"\n## {'Launchers' if table is LAUNCHER else table.tool}\n"
    yield f"From {table.source}.{shared}\n"
    yield from ("| key | in the job | how |", "|---|---|---|")
    for subject in table.subjects:
        yield _row(_names(subject, table), _code(_sections(subject.to)) or "–", subject.says)
    for row in own:
        if row.kind == "carried" and not row.to.startswith("deepspeed."):
            yield _row(_code([row.key]), _code([row.to]), "The same." if row.values is None else _values(row))
    if any(row.to.startswith("deepspeed.") for row in own):
        yield _row(
            _code(row.key for row in own if row.to.startswith("deepspeed.")),
            "`deepspeed`",
            "Verbatim.",
        )
    for kind, words in (("not needed", "Not needed"), ("not carried", "Not carried")):
        for reason, rows in groupby((row for row in own if row.kind == kind), key=lambda row: (row.reason, row.fix)):
            said = f"{words}: {reason[0]}" + (f". {reason[1]}" if reason[1] else "")
            yield _row(_code(dict.fromkeys(row.key for row in rows)), "–", said)
    if table.defaults:
        stated = ", ".join(
            f"`{key}: {str(value).lower() if isinstance(value, bool) else value}`"
            for key, value in table.defaults.items()
            if value is not None
        )
        yield f"\nWhat a file leaves out is stated where the job's default is another: {stated}.\n"


def _names(subject: Subject, table: Table) -> str:
    return _code(table.aliases.get(key, key) for key in subject.keys)


def _sections(keys: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(keys))


def _values(row: Row) -> str:
    pairs = {} if row.values is None else row.values
    return (
        "; ".join(
            f"`{theirs}` is `{str(ours).lower() if isinstance(ours, bool) else ours}`" for theirs, ours in pairs.items()
        )
        + "."
    )


def _code(keys: Iterable[str]) -> str:
    return ", ".join(f"`{key}`" for key in keys)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|").replace("<", "&lt;") for cell in cells) + " |"
