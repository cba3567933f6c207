"""The head of a data file: its columns and first records, read without torch or `datasets`."""

from __future__ import annotations

import codecs
import csv
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from toolkit.dataset_inspection.formats import kind_of, setting_of
from toolkit.errors import Problem
from toolkit.io import parse_json, parse_json_at, read_json_object

Kind = Literal["jsonl", "json", "txt", "csv", "parquet", "saved", "hub"]
SUFFIXES: dict[str, Kind] = {".jsonl": "jsonl", ".json": "json", ".txt": "txt", ".csv": "csv", ".parquet": "parquet"}

PEEK_RECORDS = 1000  # records per file: enough to show systematic mistakes, and read in under 50 ms
ENCODING_BYTES = 4096  # bytes of a text file from which its encoding is detected
# Byte order marks; that of UTF-32 begins with that of UTF-16, so it comes first.
_MARKS = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)
PEEK_BYTES = 16 * 2**20  # bytes of a .json or .csv file that are read: their records do not end with the line


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The columns, first records and problems of a file.

    Args:
        columns: Column names in order of first appearance.
        records: Pairs of line number (of a text file) or record number, from 1, and the record's columns.
        problems: Problems of the file itself.
    """

    columns: tuple[str, ...] = ()
    records: tuple[tuple[int, dict[str, Any]], ...] = ()
    problems: tuple[Problem, ...] = ()


def read_head(path: Path, kind: Kind, *, key: str, split: str = "train") -> Head:
    """Read up to `PEEK_RECORDS` records of a local file or of a folder that `datasets` saved.

    Args:
        path: Existing file, or folder for `saved`.
        kind: Kind of the file.
        key: Key path that problems name.
        split: Split of a saved `DatasetDict`.
    Returns:
        The head; its problems are DATA_EMPTY, DATA_JSON, DATA_ENCODING, DATA_READ, DATA_SPLIT.
    """
    readers: dict[str, Callable[[], Head]] = {
        "jsonl": lambda: _read_jsonl(path, key),
        "json": lambda: _read_json(path, key),
        "txt": lambda: _read_txt(path, key),
        "csv": lambda: _read_csv(path, key),
        "parquet": lambda: _read_parquet(path, key),
        "saved": lambda: _read_saved(path, key, split),
    }
    try:
        foreign = _foreign_encoding(path) if kind in ("jsonl", "json", "txt", "csv") else None
        if foreign is not None:
            return Head(problems=(_encoding_problem(path, key, f"it is {foreign}", foreign),))
        head = readers[kind]()
    except UnicodeDecodeError as error:
        found = f"{error.reason}, byte {error.object[error.start]:#04x} at offset {error.start}"
        return Head(problems=(_encoding_problem(path, key, found, "LATIN1"),))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, csv.Error) as error:
        # pyarrow.ArrowInvalid is a ValueError; the JSON of a saved folder may have any structure.
        return Head(problems=(_unreadable(path, kind, key, error),))
    if (head.columns and head.records) or head.problems:
        return head
    found = "is empty (0 bytes)" if path.is_file() and path.stat().st_size == 0 else "has no record"
    if head.records:
        found = f"has only records without a column, such as that at line {head.records[0][0]}"
    problem = Problem(code="DATA_EMPTY", key=key, message=f"{path} {found}", fix="Name files with documents")
    return Head(columns=head.columns, problems=(problem,))


def first_bad_json_line(path: Path) -> str | None:
    """Return the first line of a JSON-lines file that is not an object, with the reason; None if all are objects."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip() and isinstance(found := _parse_line(line), str):
                return f"line {number} {found}"
    return None


def _foreign_encoding(path: Path) -> str | None:
    """Return the encoding of a file that does not begin like UTF-8: with a byte order mark, or a null in every other byte."""
    with path.open("rb") as file:
        begin = file.read(ENCODING_BYTES)
    for mark, name in _MARKS:
        if begin.startswith(mark):
            return name
    # In UTF-16 markup, digits and Latin letters have a null byte each; in UTF-8 only U+0000 does.
    size = len(begin) // 2
    for name, offset in (("UTF-16LE", 1), ("UTF-16BE", 0)):
        nulls = begin[offset::2].count(0)
        if nulls >= 4 and nulls * 3 >= size and begin[1 - offset :: 2].count(0) * 10 <= size:
            return name
    return None


def _encoding_problem(path: Path, key: str, found: str, encoding: str) -> Problem:
    return Problem(
        code="DATA_ENCODING",
        key=key,
        message=f"{path} is not UTF-8: {found}",
        fix=f"Convert it: iconv -f {encoding} -t UTF-8 {path.name} > utf8-{path.name}, and name that file",
    )


def _unreadable(path: Path, kind: Kind, key: str, error: Exception) -> Problem:
    reason = (" ".join(str(error).split()) or type(error).__name__).rstrip(".")
    if kind == "saved":
        message = f"{path} is not a complete folder of `datasets`: {reason}"
        return Problem(code="DATA_READ", key=key, message=message, fix="Write it again with Dataset.save_to_disk")
    message = f"{path} cannot be read as {kind}: {reason}"
    fix = "Name a .jsonl, .json, .txt, .csv or .parquet file whose content matches its suffix"
    return Problem(code="DATA_READ", key=key, message=message, fix=fix)


def _json_problem(path: Path, key: str, found: str) -> Problem:
    if " is not UTF-8: " in found:
        line, _, byte = found.partition(" is not UTF-8: ")
        return _encoding_problem(path, key, f"{line}, {byte}", "LATIN1")
    fix = 'Write one object per line, such as {"text": "..."}, or in .json an array of objects'
    return Problem(code="DATA_JSON", key=key, message=f"{path}: {found}", fix=fix)


def _parse_line(line: bytes) -> dict[str, Any] | str:
    """Return the object of one line, or what is wrong with it."""
    try:
        value = parse_json(line.decode("utf-8-sig"))  # given bytes, the json module would guess another encoding
    except UnicodeDecodeError as error:
        return f"is not UTF-8: byte {line[error.start]:#04x} at column {error.start + 1}"
    except json.JSONDecodeError as error:
        return f"is not JSON: {error.msg} at column {error.colno}"
    except ValueError as error:
        return f"cannot be read: {error}"
    return value if isinstance(value, dict) and _is_unicode(value) else _not_a_record(value)


def _not_a_record(value: Any) -> str:
    if isinstance(value, dict):
        return r"is not Unicode: it has half of a surrogate pair (\ud800 to \udfff)"
    return f"holds {kind_of(value, null='null')}, not an object"


def _is_unicode(value: Any) -> bool:
    """Return whether every string in a JSON value is text: escapes can spell halves of surrogate pairs, which are not."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _columns(records: list[tuple[int, dict[str, Any]]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(itertools.chain.from_iterable(record for _, record in records)))


def _read_jsonl(path: Path, key: str) -> Head:
    records: list[tuple[int, dict[str, Any]]] = []
    bad: list[str] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            found = _parse_line(line)
            if isinstance(found, str):
                bad.append(f"line {number} {found}")
            else:
                records.append((number, found))
            if len(records) + len(bad) == PEEK_RECORDS:
                break
    more = f" (and {len(bad) - 1} more of the first {len(records) + len(bad)} lines)" if len(bad) > 1 else ""
    problems = (_json_problem(path, key, bad[0] + more),) if bad else ()
    return Head(columns=_columns(records), records=tuple(records), problems=problems)


def _read_json(path: Path, key: str) -> Head:
    with path.open("rb") as file:
        raw = file.read(PEEK_BYTES + 1)
    whole = len(raw) <= PEEK_BYTES
    text = raw.decode("utf-8-sig", errors="strict" if whole else "ignore")
    if not text.lstrip().startswith("["):
        return _read_jsonl(path, key)
    records: list[tuple[int, dict[str, Any]]] = []
    try:
        for number, value in enumerate(_array_items(text), 1):
            if not isinstance(value, dict) or not _is_unicode(value):
                found = f"element {number} {_not_a_record(value)}"
                return Head(records=tuple(records), problems=(_json_problem(path, key, found),))
            records.append((number, value))
            if len(records) == PEEK_RECORDS:
                break
    except json.JSONDecodeError as error:
        if whole or not records:  # otherwise the array only continues past the bytes that were read
            found = f"line {error.lineno} is not JSON: {error.msg} at column {error.colno}"
            return Head(columns=_columns(records), records=tuple(records), problems=(_json_problem(path, key, found),))
    return Head(columns=_columns(records), records=tuple(records))


def _array_items(text: str) -> Iterator[Any]:
    """Yield the elements of a JSON array one by one, so that a long file need not be read to its end."""

    def skip(at: int) -> int:
        while at < len(text) and text[at] in " \t\r\n":
            at += 1
        return at

    at = skip(text.index("[") + 1)
    while text[at : at + 1] != "]":
        value, at = parse_json_at(text, at)
        yield value
        at = skip(at)
        if text[at : at + 1] == ",":
            at = skip(at + 1)
            if text[at : at + 1] == "]":
                raise json.JSONDecodeError("Expecting value", text, at)
        elif text[at : at + 1] != "]":
            raise json.JSONDecodeError("Expecting ',' or ']'", text, at)
    if skip(at + 1) < len(text):
        raise json.JSONDecodeError("Extra data after the array", text, skip(at + 1))


def _read_txt(path: Path, key: str) -> Head:
    with path.open(encoding="utf-8-sig") as lines:
        filled = ((number, {"text": line.rstrip("\n")}) for number, line in enumerate(lines, 1) if line.strip())
        return Head(columns=("text",), records=tuple(itertools.islice(filled, PEEK_RECORDS)))


def _read_csv(path: Path, key: str) -> Head:
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = file.readlines(PEEK_BYTES)
    blank = next((index for index, line in enumerate(lines) if line.strip()), len(lines))
    with wide_cells():
        rows = csv.DictReader(lines[blank:])
        columns = tuple(rows.fieldnames or ())
        records = tuple((blank + rows.line_num, dict(row)) for row in itertools.islice(rows, PEEK_RECORDS))
        ends_open = path.stat().st_size <= PEEK_BYTES and len(records) < PEEK_RECORDS and _ends_in_quotes(lines[blank:])
    ragged = next((number for number, record in records if None in record), None)
    repeated = [column for column, times in Counter(columns).items() if times > 1]
    if ragged is not None:
        message = f"{path}: line {ragged} has more cells than the header's {len(columns)}"
        fix = 'Quote cells that have a comma: "a, b"'
    elif repeated:
        message, fix = f"{path}: the header names {repeated[0]!r} more than once", "Give each column a different name"
    elif ends_open:
        message = f"{path}: a quoted cell is not closed"
        fix = 'Close each quoted cell, and double the quotes inside it: "she said ""no"""'
    else:
        return Head(columns=columns, records=records)
    return Head(columns=columns, problems=(Problem(code="DATA_READ", key=key, message=message, fix=fix),))


@contextmanager
def wide_cells() -> Iterator[None]:
    """Let the csv module read cells of up to `PEEK_BYTES`; its limit is global to the process, and is restored."""
    limit = csv.field_size_limit(PEEK_BYTES)
    try:
        yield
    finally:
        csv.field_size_limit(limit)


def _ends_in_quotes(lines: list[str]) -> bool:
    """Return whether the text ends inside a quoted cell, which pandas refuses and the csv module closes silently."""
    try:
        for _ in csv.reader(lines, strict=True):
            pass
    except csv.Error as error:
        return "unexpected end of data" in str(error)
    return False


def _read_parquet(path: Path, key: str) -> Head:
    if path.stat().st_size == 0:
        return Head()
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        columns = tuple(file.schema_arrow.names)
        batch = next(file.iter_batches(batch_size=PEEK_RECORDS), None)
        rows = [] if batch is None else batch.to_pylist()
    return Head(columns=columns, records=tuple(enumerate(rows, 1)))


def _read_saved(path: Path, key: str, split: str) -> Head:
    import pyarrow.ipc

    splits_file = path / "dataset_dict.json"
    if splits_file.is_file():
        splits = [str(name) for name in read_json_object(splits_file)["splits"]]
        if split not in splits:
            message = f"{path} has no split {split!r}: it has {', '.join(splits)}"
            problem = Problem(
                code="DATA_SPLIT",
                key=setting_of(key, "split"),
                message=message,
                fix=f"Set it to one of {', '.join(splits)}",
            )
            return Head(problems=(problem,))
        path = path / split
    state, info = read_json_object(path / "state.json"), read_json_object(path / "dataset_info.json")
    rows: list[dict[str, Any]] = []
    for entry in state["_data_files"]:
        with pyarrow.memory_map(str(path / entry["filename"])) as source:
            for batch in pyarrow.ipc.open_stream(source):
                head = batch.slice(0, PEEK_RECORDS - len(rows))
                head.validate(full=True)  # offsets of a damaged file may point anywhere
                rows += head.to_pylist()
                if len(rows) >= PEEK_RECORDS:
                    break
    if not isinstance(info["features"], dict):  # by name, as `datasets.Features` serialises itself
        raise ValueError(f"features of dataset_info.json is {kind_of(info['features'])}, not an object")
    return Head(columns=tuple(info["features"]), records=tuple(enumerate(rows, 1)))
