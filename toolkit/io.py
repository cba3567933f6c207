"""Files on disk: those that are whole or absent, those that others wrote, and plain files that lie inside one folder."""

from __future__ import annotations

import errno
import json
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

# Above every manifest and configuration: that of a checkpoint of 10,000 ranks has some 30,000 files, 130 bytes each.
MAX_TEXT_BYTES = 64 * 2**20
# Bytes of a text that others wrote and a person names, which are read: some times the largest published tokenizer.json.
MAX_FOREIGN_BYTES = 256 * 2**20

_TOO_DEEP = "lists or objects are nested too deep"
# Kinds of entries that a read would wait on, or never come to the end of.
_KINDS = ((stat.S_ISDIR, "folder"), (stat.S_ISFIFO, "pipe"), (stat.S_ISSOCK, "socket"))


def write_text(path: Path, text: str, *, sync: bool = False) -> None:
    """Write a file whole or not at all.

    Args:
        path: Replaced if it is a file; a character device such as a terminal or /dev/null is written to and stays one.
        text: Written as UTF-8.
        sync: Forces it to disk.

    Raises:
        OSError: It cannot be written, or is a pipe, a socket or a disk, which a file may not take the place of.
    """
    if (mode := _special_mode(path)) is not None:
        if not stat.S_ISCHR(mode):
            raise OSError(errno.EINVAL, "is no file", str(path))
        path.write_text(text, encoding="utf-8")
        return
    # Ranks of several machines may write one file at once, where neither process id nor host name is unique.
    partial = path.parent / f".{path.name}.{secrets.token_hex(8)}"  # with_name refuses "." and "/", which are folders
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _special_mode(path: Path) -> int | None:
    """The mode of what lies at a path and is neither a file nor a folder; None for these and for nothing."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):  # writing says why, where it matters
        return None
    return None if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else mode


def write_json(
    path: Path, value: Any, *, sync: bool = False, sort_keys: bool = False, ensure_ascii: bool = False
) -> None:
    """Write a value as indented JSON, whole or not at all.

    Args:
        path: Replaced if it exists.
        value: What `json` can write.
        sync: Forces the file to disk.
        sort_keys: Orders the keys of every object.
        ensure_ascii: Escapes all else, so that text with lone surrogates, as of undecodable paths, can be written.
    """
    text = json.dumps(value, indent=2, ensure_ascii=ensure_ascii, sort_keys=sort_keys)
    write_text(path, f"{text}\n", sync=sync)


def nearest_folder(path: Path) -> Path:
    """The folder at a path, or the nearest one above it."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())


@contextmanager
def made_folder(path: Path) -> Iterator[None]:
    """Make a folder and those above it for a block, after which those of them that are empty go again."""
    absent = [folder for folder in (path, *path.absolute().parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for folder in absent:
            with suppress(OSError):
                folder.rmdir()


def sync_folder(path: Path) -> None:
    """Force a folder's entries to disk, so that a rename survives a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def parse_json(text: str | bytes) -> Any:
    """Parse one JSON value.

    Raises:
        ValueError: JSONDecodeError, UnicodeDecodeError, a number of thousands of digits, or nesting that Python's
            parser cannot follow, which it reports as RecursionError.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def parse_object(text: str) -> dict[str, Any]:
    """Parse one JSON object; raises as `parse_json` does, and ValueError for another value."""
    value = parse_json(text)
    if not isinstance(value, dict):
        raise ValueError(f"it holds a {type(value).__name__}, not an object")
    return value


def parse_json_at(text: str, at: int) -> tuple[Any, int]:
    """Parse the value that begins at an offset; return it and the offset after it. Raises like `parse_json`."""
    try:
        return json.JSONDecoder().raw_decode(text, at)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def read_text(path: Path, *, max_bytes: int = MAX_FOREIGN_BYTES) -> str:
    """Read a file of UTF-8 text to its end, if that comes: a device has none, and a pipe that nobody writes to is empty.

    Raises:
        OSError: It cannot be read.
        ValueError: It is not UTF-8, or larger than `max_bytes`.
    """
    with open(path, "rb", opener=_open_at_once) as file:
        os.set_blocking(file.fileno(), True)
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"it has more than {max_bytes} bytes")
    return content.decode("utf-8")


def _open_at_once(path: str, flags: int) -> int:
    """Open a file without waiting for the other end, should it be a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


def read_json_object(path: Path, *, max_bytes: int = MAX_FOREIGN_BYTES) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        OSError, ValueError: It cannot be read, is larger than `max_bytes`, is not JSON, or holds another value.
    """
    return parse_object(read_text(path, max_bytes=max_bytes))


def read_plain_object(folder: Path, name: str) -> dict[str, Any]:
    """Read a plain file inside a folder that holds one JSON object.

    Raises:
        OSError, ValueError: It cannot be read, is not JSON in UTF-8, or holds another value.
    """
    return parse_object(read_plain(folder, name, max_bytes=MAX_TEXT_BYTES).decode("utf-8"))


def plain_file(folder: Path, name: str) -> Path:
    """The path of a plain file inside a folder, whatever links lead to it.

    Args:
        folder: What the file must lie in.
        name: Relative to it.

    Raises:
        OSError: It is missing, lies outside, or is no plain file: a pipe or a device would be read without end.
        ValueError: The name can be no file's.
    """
    path = folder / name
    mode = path.stat().st_mode
    if not path.resolve().is_relative_to(folder.resolve()):
        raise OSError("leads out of the folder")
    if not stat.S_ISREG(mode):
        kind = next((kind for is_kind, kind in _KINDS if is_kind(mode)), "device")
        raise OSError(f"is a {kind}, not a plain file")
    return path


def open_plain(folder: Path, name: str) -> BinaryIO:
    """Open a plain file inside a folder for reading; raises as `plain_file` does."""
    file = open(plain_file(folder, name), "rb", opener=_open_at_once)  # noqa: SIM115 - the caller closes it
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # something else has taken its place meanwhile
        file.close()
        raise OSError("is no plain file")
    return file


def read_plain(folder: Path, name: str, *, max_bytes: int) -> bytes:
    """Read a plain file inside a folder.

    Raises:
        OSError: As `plain_file`, or it is larger than `max_bytes`.
    """
    with open_plain(folder, name) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(f"has more than {max_bytes} bytes")
    return content
