"""What the commands print is plain text: no markup, no control characters."""

from __future__ import annotations

import pytest

from toolkit.cli.output import new_table, print_problems, print_table
from toolkit.errors import Problem


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("a\x00b", r"a\x00b"),
        ("\x1b[2J", r"\x1b[2J"),
        ("one\n  two\r\nthree", "one two three"),
        ("\u202eevil", r"\u202eevil"),
        ("a\u2028b\ud800", r"a\u2028b\ud800"),
        ("Größe 名 😀", "Größe 名 😀"),
    ],
)
def test_a_problem_is_one_line_that_no_terminal_obeys(
    value: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = Problem(code="KEY_UNKNOWN", key=value, message=f"key={value} is unknown", fix=f"Remove {value}")
    assert str(problem) == f"key={shown} is unknown. Remove {shown}. [KEY_UNKNOWN]"
    print_problems([problem], as_json=False)
    assert capsys.readouterr().err == f"error: {problem}\n"


def test_brackets_and_colons_in_a_table_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    table = new_table(["path"])
    table.add_row("runs/[/b][red]x:smile:")
    print_table(table)
    assert "runs/[/b][red]x:smile:" in capsys.readouterr().out
