"""`toolkit data`: the rows that a job trains on, as text, and what of its data is learned, padded or left out."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from toolkit.cli.options import JobArgument, JsonOption, SetOption, read_plan
from toolkit.cli.output import new_table, print_fields, print_json, print_table, warn

_OPEN, _CLOSE = "{+", "+}"  # as in `git diff --word-diff`


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(data)


def data(
    job: JobArgument,
    rows: Annotated[int, typer.Option("--rows", min=0, metavar="N", help="Number of rows to show as text.")] = 2,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a job trains on: tokens, padding, what is cut or left out, and rows as text with what is learned marked.

    Tokenises the data as the run will, into the same cache; needs no GPU. What is learned is green on a terminal, and between
    `{+` and `+}` elsewhere.

    Example: `toolkit data job.yaml --rows 5 --set data.packing=separated`

    JSON keys: format, warnings, sources (name, records, documents of an epoch), streamed (then train is of the first 1000
    documents), train, eval (null without validation data, or with named sets) and eval_sets (by name), each with documents, sequences, tokens,
    target_tokens, truncated, dropped_long, dropped_tokens, dropped_documents, dropped_sequences, padding_fraction, packing, per_token (or a label a text),
    sequence_length, document_tokens (median, p95, max, total); rows (row, tokens, learned, padding, text: pairs of text
    and whether it is learned).
    """
    plan = read_plan(job, overrides)
    from toolkit.config.user_code import find_beside
    from toolkit.data.prepare import prepare_plan
    from toolkit.data.preview import preview
    from toolkit.trainer.tokenizer import load_tokenizer

    find_beside(job)
    tokenizer = load_tokenizer(plan)
    prepared = prepare_plan(plan, tokenizer, train_batch_size=1, progress=sys.stderr.isatty() and not as_json)
    found = preview(prepared, tokenizer, rows=rows)
    if as_json:
        print_json(found)
        return
    warn(found["warnings"])
    if len(found["sources"]) > 1:
        table = new_table(("source", "records", "documents of an epoch"), right=("records", "documents of an epoch"))
        for share in found["sources"]:
            table.add_row(share["name"], f"{share['records']:,}", f"{share['documents']:,}")
        print_table(table)
    parts = {part: found[part] for part in ("train", "eval") if found[part] is not None}
    for part, figures in (parts | {f"eval {name}": each for name, each in found["eval_sets"].items()}).items():
        head = ", the first documents of a stream" if part == "train" and found["streamed"] else ""
        print(f"{part}: {found['format']}, packing {figures['packing']}{head}")
        print_fields(_fields(figures))
    for row in found["rows"]:
        _print_row(row, found["train"]["sequences"])


def _fields(figures: dict[str, Any]) -> list[tuple[str, str]]:
    lengths, documents = figures["document_tokens"], figures["documents"]
    tokens, learned = figures["tokens"], figures["target_tokens"]
    most = "at most " if figures["packing"] == "none" else ""
    return [
        (
            "documents",
            f"{documents:,}; tokens: median {lengths['median']:,}, 95 % {lengths['p95']:,}, max {lengths['max']:,}, "
            f"total {lengths['total']:,}",
        ),
        ("rows", f"{figures['sequences']:,} of {most}{figures['sequence_length']:,} tokens"),
        (
            "learned",
            f"{learned:,} of {tokens:,} tokens ({learned / tokens:.1%})"
            if figures["per_token"]
            else f"{learned:,} labels",
        ),
        ("padding", f"{figures['padding_fraction']:.1%}"),
        ("cut", f"{figures['truncated']:,} documents ({figures['truncated'] / documents:.1%})"),
        (
            "left out",
            f"{figures['dropped_documents']:,} documents without a token, {figures['dropped_long']:,} longer than a row, {figures['dropped_sequences']:,} rows without "
            f"a learned one; {figures['dropped_tokens']:,} tokens ({figures['dropped_tokens'] / lengths['total']:.1%})",
        ),
    ]


def _print_row(row: dict[str, Any], num_rows: int) -> None:
    padding = f", {row['padding']:,} of padding" if row["padding"] else ""
    title = f"row {row['row'] + 1:,} of {num_rows:,}: {row['tokens']:,} tokens, {row['learned']:,} learned{padding}"
    if not sys.stdout.isatty():
        print(f"\n{title}\n" + "".join(f"{_OPEN}{text}{_CLOSE}" if learned else text for text, learned in row["text"]))
        return
    from rich.console import Console
    from rich.text import Text

    shown = Text.assemble(*((text, "bold green" if learned else "dim") for text, learned in row["text"]))
    console = Console(highlight=False, markup=False, emoji=False)
    console.rule(title, align="left")
    console.print(shown)
