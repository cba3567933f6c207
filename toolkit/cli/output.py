"""Output of the commands: text, tables and JSON on stdout, problems on stderr."""

from __future__ import annotations

import contextlib
import io
import json
import os
import stat
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.errors import Problem, one_line

if TYPE_CHECKING:
    from rich.table import Table


# What Ctrl-C prints, unless a command knows more.
INTERRUPTED = "Interrupted."


def prepare_streams() -> None:
    """Make stdout and stderr accept any text: closed ones drop it, and characters that their encoding lacks are escaped.

    So does stdout after its reader has gone, as in `toolkit plan JOB | head -1`: a command then ends as it would have, with its
    own exit code.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - open until the end
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
            if name == "stdout" and stream is sys.__stdout__ and not stream.closed:
                with contextlib.suppress(OSError, ValueError):
                    sys.stdout = unless_reader_has_gone(stream)


def unless_reader_has_gone(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """Return a stream that drops what is written after the reader of its pipe has gone; the same stream if it is no pipe."""
    if not stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode):
        return stream
    stream.flush()
    pipe: Any = _Pipe(stream.fileno(), "wb", closefd=False)
    return io.TextIOWrapper(
        pipe if stream.write_through else io.BufferedWriter(pipe),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _Pipe(io.FileIO):
    """A pipe whose writes go nowhere after its reader has gone."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return super().write(data)


def discard_stdout() -> None:
    """Drop the remaining output to stdout after its reader has gone or its disk is full.

    Without this the interpreter would complain when it flushes at exit.
    """
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_json(value: Any) -> None:
    """Print one JSON document on stdout; in ASCII if stdout cannot encode all of Unicode."""
    encoding = (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "")
    print(json.dumps(value, indent=2, ensure_ascii=encoding != "utf8", allow_nan=False))


def print_problems(problems: Iterable[Problem], *, as_json: bool) -> None:
    """Print problems: one line each on stderr, or `{"problems": […]}` on stdout."""
    found = list(problems)
    if as_json:
        print_json({"problems": [problem.as_dict() for problem in found]})
        return
    for problem in found:
        print_marked("error", problem.with_key, style="bold red")
    if len(found) > 1:
        print(f"{len(found)} problems", file=sys.stderr)


def warn(lines: Iterable[str]) -> None:
    """Print warnings on stderr, one line each."""
    for line in lines:
        print_marked("warning", one_line(line), style="bold yellow")


def say(line: str) -> None:
    """Print a progress line on stderr."""
    print(line, file=sys.stderr, flush=True)


def print_marked(mark: str, line: str, *, style: str) -> None:
    """Print a line on stderr after a coloured word; rich is imported only if there are colours."""
    if not sys.stderr.isatty():
        print(f"{mark}: {line}", file=sys.stderr)
        return
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True, soft_wrap=True, highlight=False).print(Text.assemble((f"{mark}: ", style), line))


def new_table(columns: Sequence[str], *, right: Sequence[str] = ()) -> Table:
    """Return an empty table.

    Args:
        columns: Column headings.
        right: Headings of the columns to align right.
    """
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def print_table(table: Table) -> None:
    """Print a table: as wide as the terminal, or as wide as its content if stdout is not one."""
    from rich.console import Console

    # Cells contain paths and names, whose brackets are not markup and whose :words: are not emoji.
    plain = partial(Console, highlight=False, markup=False, emoji=False)
    # Measured at a very large width: a pipe has none, and a wrapped table cannot be searched.
    natural = plain(width=10_000).measure(table).maximum
    if sys.stdout.isatty():
        plain().print(table)
        return
    text = io.StringIO()
    plain(width=natural, file=text).print(table)
    for line in text.getvalue().splitlines():  # without the blanks that fill the last column
        print(line.rstrip())


def print_fields(fields: Iterable[tuple[str, str]]) -> None:
    """Print name and value pairs as two aligned columns."""
    pairs = list(fields)
    width = max(len(name) for name, _ in pairs)
    for name, value in pairs:
        print(f"  {name:<{width}}  {value}")
