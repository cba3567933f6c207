"""What commands print: text, tables and JSON on stdout, problems on stderr."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.errors import Problem, one_line

if TYPE_CHECKING:
    from rich.table import Table


def prepare_streams() -> None:
    """Makes stdout and stderr take any text: closed ones swallow it, and what their encoding lacks is spelled out."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - open until the end
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def discard_stdout() -> None:
    """Lets what is left for stdout vanish, once its reader has gone or its disk is full.

    Without this the interpreter would complain when it flushes at exit.
    """
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_json(value: Any) -> None:
    """Prints one JSON document on stdout; in ASCII where stdout does not take all of Unicode."""
    encoding = (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "")
    print(json.dumps(value, indent=2, ensure_ascii=encoding != "utf8", allow_nan=False))


def print_problems(problems: Iterable[Problem], *, as_json: bool) -> None:
    """Prints problems: one line each on stderr, or `{"problems": […]}` on stdout."""
    found = list(problems)
    if as_json:
        print_json({"problems": [problem.as_dict() for problem in found]})
        return
    for problem in found:
        name = one_line(problem.key)
        key = "" if not name or name in problem.message else f"{name}: "
        _print_marked("error", f"{key}{problem}", style="bold red")
    if len(found) > 1:
        print(f"{len(found)} problems", file=sys.stderr)


def warn(lines: Iterable[str]) -> None:
    """Prints warnings on stderr, one line each."""
    for line in lines:
        _print_marked("warning", one_line(line), style="bold yellow")


def say(line: str) -> None:
    """Tells on stderr what goes on."""
    print(line, file=sys.stderr, flush=True)


def _print_marked(mark: str, line: str, *, style: str) -> None:
    """Prints a line on stderr behind a coloured word; rich is imported only where there are colours."""
    if not sys.stderr.isatty():
        print(f"{mark}: {line}", file=sys.stderr)
        return
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True, soft_wrap=True, highlight=False).print(Text.assemble((f"{mark}: ", style), line))


def new_table(columns: Sequence[str], *, right: Sequence[str] = ()) -> Table:
    """Return an empty table.

    Args:
        columns: Heads.
        right: Those of them whose cells are set flush right.
    """
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def print_table(table: Table) -> None:
    """Prints a table: as wide as the terminal, or as wide as its content where stdout is none."""
    from rich.console import Console

    # Cells hold paths and names, whose brackets are no markup and whose :words: are no pictures.
    plain = partial(Console, highlight=False, markup=False, emoji=False)
    # Measured at a width that nothing reaches: a pipe has none, and a folded table cannot be searched.
    natural = plain(width=10_000).measure(table).maximum
    (plain() if sys.stdout.isatty() else plain(width=natural)).print(table)


def print_fields(fields: Iterable[tuple[str, str]]) -> None:
    """Prints name and value pairs as two aligned columns."""
    pairs = list(fields)
    width = max(len(name) for name, _ in pairs)
    for name, value in pairs:
        print(f"  {name:<{width}}  {value}")
