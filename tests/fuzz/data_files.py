"""Data files of every kind and layout that are sound or nearly so, and what is in them by another reader than the toolkit's."""

from __future__ import annotations

import copy
import csv
import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
from mutations import Tree, encoded, misspelt, mutate, mutate_bytes, mutate_text, odd_value

TEXTS = (
    "hello there", "a", "", " ", "12", "-0", "1e5", "1e999", "null", "None", "NaN", "NA", "N/A", "true", "2020-01-01", "2020-01-01 00:00:00",
    "2020-01-01T00:00:00Z", "12:30", "0x10", "007", "a,b", 'say "no"', '"', "'", "two\nlines", "two\r\nlines", "\n", "\r", "tab\there",
    "\\n", "\\", "#x", "=1+1", "é", "e\u0301", "名前", "😀", "👩‍👩‍👧", "\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1f", "\ufeff", "a\ufeffb", "\x00",
    "<|im_start|>user", "<s>", "{% x %}", "{{ x }}", "{0}", "x" * 3000, "word " * 200, "\ud83d", "\u202e", "[]", "{}", "a;b|c",
)  # fmt: skip
ROLES = ("user", "assistant", "system", "tool", "human", "gpt", "User", "", "narrator", "chatgpt")
EXTRA = (
    "id",
    "source",
    "input",
    "system",
    "history",
    "context",
    "text",
    "prompt",
    "messages",
    "tools",
    "weight",
    "train",
    "Text",
    "text ",
)


def _text(rng: random.Random) -> str:
    return (
        rng.choice(TEXTS)
        if rng.random() < 0.5
        else " ".join(rng.choice(("some", "words", "of", "it", "7")) for _ in range(rng.randrange(1, 9)))
    )


def _turns(rng: random.Random, speaker: str, said: str, roles: tuple[str, str]) -> list[dict[str, str]]:
    turns = [{speaker: roles[index % 2], said: _text(rng)} for index in range(rng.choice((1, 2, 2, 2, 3, 4)))]
    while rng.random() < 0.1:
        rng.choice(turns)[speaker] = rng.choice(ROLES)
    return turns


def _with_texts(value: Any, text: str) -> Any:
    """The same record with one text everywhere but in the roles."""
    if isinstance(value, dict):
        return {key: item if key in ("role", "from") else _with_texts(item, text) for key, item in value.items()}
    return [_with_texts(item, text) for item in value] if isinstance(value, list) else text


LAYOUTS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "text": lambda rng: {"text": _text(rng)},
    "pairs": lambda rng: {"prompt": _text(rng), "completion": _text(rng)},
    "messages": lambda rng: {"messages": _turns(rng, "role", "content", ("user", "assistant"))},
    "alpaca": lambda rng: {"instruction": _text(rng), "input": _text(rng) if rng.random() < 0.5 else "", "output": _text(rng)},
    "sharegpt": lambda rng: {"conversations": _turns(rng, "from", "value", ("human", "gpt"))},
}  # fmt: skip


def draw_records(rng: random.Random) -> Tree:
    """Records of one layout; those of a share of the cases with a few changes."""
    name = rng.choice(tuple(LAYOUTS))
    records: Tree = [LAYOUTS[name](rng) for _ in range(rng.choice((1, 2, 3, 5, 8, 20)))]
    if rng.random() < 0.15:  # a whole column of what looks like another type
        same = rng.choice(TEXTS)
        records = [_with_texts(record, same) for record in records]
    while rng.random() < 0.1:
        key, value = rng.choice(EXTRA), rng.choice((_text(rng), None, 0, [], {"a": 1}, odd_value(rng)))
        for record in records if rng.random() < 0.5 else rng.sample(records, 1):
            record.setdefault(key, copy.deepcopy(value))
    while rng.random() < 0.3 and isinstance(records, list) and records:
        records = mutate(rng, records, names=("text", "prompt", "completion", "messages", "role", "content", *EXTRA))
    if rng.random() < 0.05 and isinstance(records, list) and records and isinstance(records[0], dict) and records[0]:
        key = rng.choice(sorted(records[0], key=str))
        other = misspelt(rng, str(key))
        records = [
            {other if name == key else name: value for name, value in record.items()}
            if isinstance(record, dict)
            else record
            for record in records
        ]
    return records


def write_file(rng: random.Random, folder: Path, number: int) -> Path | None:
    """Writes a file of drawn records; None where the kind cannot hold them."""
    records = draw_records(rng)
    kind = rng.choice(("jsonl", "jsonl", "jsonl", "json", "csv", "txt", "parquet", "saved"))
    path = folder / f"data-{number}.{kind}"
    if kind == "saved":
        return _write_saved(rng, path, records)
    if kind == "parquet":
        return _write_parquet(rng, path, records)
    text = _as_text(rng, kind, records)
    if text is None:
        return None
    while rng.random() < 0.15:
        text = mutate_text(rng, text, snippets=TEXTS)
    path.write_bytes(encoded(rng, text, share=0.06))
    return path


def _as_text(rng: random.Random, kind: str, records: Tree) -> str | None:
    if not isinstance(records, list):
        records = [records]
    ascii_only = rng.random() < 0.5
    dump = lambda value: json.dumps(value, ensure_ascii=ascii_only)  # noqa: E731
    if kind == "jsonl":
        return "".join(dump(record) + rng.choice(("\n", "\n", "\n", "\r\n", "\n\n")) for record in records)
    if kind == "json":
        return dump(records)
    if kind == "txt":
        return "".join(f"{record.get('text', record) if isinstance(record, dict) else record}\n" for record in records)
    columns = list(dict.fromkeys(str(key) for record in records if isinstance(record, dict) for key in record))
    if not columns:
        return None
    out = io.StringIO()
    writer = csv.writer(
        out, quoting=rng.choice((csv.QUOTE_MINIMAL, csv.QUOTE_ALL)), lineterminator=rng.choice(("\n", "\r\n"))
    )
    try:
        writer.writerow(columns)
        for record in records:
            cells = [record.get(column, "") for column in columns] if isinstance(record, dict) else [record]
            writer.writerow(cells)
    except csv.Error:
        return None
    return out.getvalue()


def _write_parquet(rng: random.Random, path: Path, records: Tree) -> Path | None:
    try:
        table = pa.Table.from_pylist(records)
        pyarrow.parquet.write_table(table, path, row_group_size=rng.choice((1, 3, 1000)))
    except (pa.ArrowException, TypeError, AttributeError, ValueError, OverflowError, RecursionError, KeyError):
        return None
    if rng.random() < 0.15:
        path.write_bytes(mutate_bytes(rng, path.read_bytes()))
    return path


def _write_saved(rng: random.Random, path: Path, records: Tree) -> Path | None:
    """A folder of `datasets`, in one of two with a file that is not as it was written."""
    try:
        made = datasets.Dataset.from_list(records)
        made.save_to_disk(path, num_shards=min(len(made), rng.choice((1, 1, 2))))
    except (
        pa.ArrowException,
        TypeError,
        AttributeError,
        ValueError,
        OverflowError,
        RecursionError,
        KeyError,
        IndexError,
    ):
        return None
    if rng.random() < 0.5:
        return path
    file = rng.choice(sorted(path.iterdir()))
    if file.suffix != ".json" or rng.random() < 0.1:
        file.write_bytes(mutate_bytes(rng, file.read_bytes()))
        return path
    value = mutate(
        rng,
        json.loads(file.read_text("utf-8")),
        names=("features", "_type", "_data_files", "filename", "dtype", "../x"),
    )
    file.write_bytes(encoded(rng, json.dumps(value), share=0.05))
    return path


def records_in(path: Path) -> list[Any]:
    """The records of a file that was accepted, read by the plainest means.

    Raises:
        ValueError: It is none of its kind, so it should not have been accepted.
    """
    if path.is_dir():
        files = [entry["filename"] for entry in json.loads((path / "state.json").read_text("utf-8"))["_data_files"]]
        return [row for name in files for row in pyarrow.ipc.open_stream(path / name).read_all().to_pylist()]
    if path.suffix == ".parquet":
        return pyarrow.parquet.read_table(path).to_pylist()
    text = path.read_bytes().decode("utf-8-sig")
    if path.suffix == ".txt":
        lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        return [{"text": line} for line in lines]
    if path.suffix == ".csv":
        rows = list(csv.reader(io.StringIO(text, newline=""), strict=False))
        rows = [row for row in rows if row]
        return [dict(zip(rows[0], row, strict=False)) for row in rows[1:]]
    if path.suffix == ".json" and text.lstrip().startswith("["):
        return list(json.loads(text))
    return [json.loads(line) for line in text.split("\n") if line.strip()]


ALPACA = "Below is an instruction that describes a task{}. Write a response that appropriately completes the request."


def document_of(record: dict[str, Any], format_: str) -> Any:
    """What a record says in the format that was found; None where it is no document of it."""
    if not isinstance(record, dict):
        return None
    if format_ == "text":
        return record.get("text")
    if format_ == "prompt_completion":
        if "prompt" in record and "completion" in record:
            return record["prompt"], record["completion"]
        return _alpaca(record)
    if "messages" in record:
        turns = record["messages"]
        return [{"role": turn["role"], "content": turn.get("content")} for turn in turns]
    if "conversations" in record:
        names = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant"}
        turns = record["conversations"]
        system = record.get("system")
        first = [{"role": "system", "content": system}] if system and system.strip() else []
        speaker = [turn.get("from") if turn.get("from") is not None else turn["role"] for turn in turns]
        said = [turn.get("value") if turn.get("value") is not None else turn["content"] for turn in turns]
        return first + [
            {"role": names.get(who.lower(), who.lower()), "content": what}
            for who, what in zip(speaker, said, strict=True)
        ]
    return None


def _alpaca(record: dict[str, Any]) -> tuple[str, str]:
    given = record.get("input") or ""
    paired = bool(given.strip())
    head = ALPACA.format(", paired with an input that provides further context" if paired else "")
    middle = f"\n\n### Input:\n{given}" if paired else ""
    return f"{head}\n\n### Instruction:\n{record['instruction']}{middle}\n\n### Response:\n", record["output"]


TEMPLATE_PIECES = (
    "{{", "}}", "{%", "%}", "{% for m in messages %}", "{% endfor %}", "{% if add_generation_prompt %}", "{% endif %}", "{{ messages[0] }}",
    "{{ messages[9] }}", "{{ m.x.y }}", "{{ 1 / 0 }}", "{{ raise_exception('no') }}", "{% generation %}", "{% endgeneration %}", "{{ bos_token }}",
    "{{ ''.__class__ }}", "{{ range(10 ** 9) }}", "{{ 'a' * 10 ** 6 }}", "{% set x = 1 %}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{# x", "{{ messages | tojson }}",
    "{{ message['content'] | trim }}", "{{ loop.index }}", "{% include 'x' %}", "{{ lipsum() }}", "{{ strftime_now('%Y') }}", "{% break %}",
)  # fmt: skip


def write_template(rng: random.Random, path: Path, template: str) -> Path:
    """A chat template with a few slips."""
    while True:
        template = mutate_text(rng, template, snippets=TEMPLATE_PIECES)
        if rng.random() < 0.5:
            break
    path.write_bytes(encoded(rng, template, share=0.05))
    return path
