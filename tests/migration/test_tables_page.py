"""The page of the documentation has the tables by which files are migrated."""

from __future__ import annotations

from pathlib import Path

from toolkit.migration.detection import TABLES
from toolkit.migration.tables_page import MARK, tables_text

PAGE = Path(__file__).parents[2] / "docs" / "migrate.md"


def test_the_page_is_fresh():
    above, mark, below = PAGE.read_text().partition(f"{MARK}\n")
    assert mark
    assert above.startswith("# From other tools")
    assert below == tables_text(), "write tables_text() below the mark"


def test_every_key_is_on_the_page():
    text = tables_text()
    for table in TABLES:
        for key in table.keys:
            assert f"`{key}`" in text, (table.tool, key)
