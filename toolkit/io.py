"""Files on disk: atomic writes, reads of foreign files, and reads of regular files inside one folder."""

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

# Larger than any manifest or configuration: a checkpoint of 10,000 ranks has about 30,000 files, of 130 bytes each.
MAX_TEXT_BYTES = 64 * 2**20
# Largest foreign text file that is read, in bytes: several times the largest published tokenizer.json.
MAX_FOREIGN_BYTES = 256 * 2**20

_TOO_DEEP = "lists or objects are nested too deep"
# Kinds of entries on which a read would block or never end.
_KINDS = ((stat.S_ISDIR, "folder"), (stat.S_ISFIFO, "pipe"), (stat.S_ISSOCK, "socket"))


def write_text(path: Path, text: str, *, sync: bool = False) -> None:
    """Write a file atomically.

    Args:
        path: Path to write; a file is replaced, a character device such as a terminal or /dev/null is written to.
        text: Text to write as UTF-8.
        sync: Whether to force the file to disk.

    Raises:
        OSError: If it cannot be written, or is a pipe, a socket or a block device, which a file must not replace.
    """
    if (mode := _special_mode(path)) is not None:
        if not stat.S_ISCHR(mode):
            raise OSError(errno.EINVAL, "is not a file", str(path))
        path.write_text(text, encoding="utf-8")
        return
    partial = _beside(path)
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


def check_writable(path: Path) -> None:
    """Find out whether `write_text` could write a file, and its folder be made; nothing is left behind.

    Raises:
        OSError: As `write_text` would.
    """
    if (mode := _special_mode(path)) is not None:
        if not stat.S_ISCHR(mode):
            raise OSError(errno.EINVAL, "is not a file", str(path))
        return
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
    above = next(folder for folder in path.absolute().parents if os.path.lexists(folder))
    if not above.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{above} is not a folder", str(path))
    with made_folder(path.parent):
        partial = _beside(path)
        try:
            partial.touch()
        finally:
            partial.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    """Return the path of a hidden file in the same folder, whose name nobody else has."""
    # Ranks of several machines may write one file concurrently, and neither process id nor host name is unique.
    return path.parent / f".{path.name}.{secrets.token_hex(8)}"  # with_name refuses "." and "/", which are folders


def _special_mode(path: Path) -> int | None:
    """Return the mode of a special file at a path; None for regular files, folders and missing paths."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):  # writing reports the reason if it matters
        return None
    return None if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else mode


def write_json(
    path: Path, value: Any, *, sync: bool = False, sort_keys: bool = False, ensure_ascii: bool = False
) -> None:
    """Write a value as indented JSON, atomically.

    Args:
        path: Path to write; a file is replaced.
        value: Value that `json` can serialise.
        sync: Whether to force the file to disk.
        sort_keys: Whether to sort the keys of every object.
        ensure_ascii: Whether to escape non-ASCII characters, so that lone surrogates of undecodable paths can be written.
    """
    text = json_text(value, sort_keys=sort_keys, ensure_ascii=ensure_ascii, allow_nan=True)
    write_text(path, text, sync=sync)


def json_text(value: Any, *, sort_keys: bool = False, ensure_ascii: bool = False, allow_nan: bool = False) -> str:
    """Return a value as the text of an indented JSON file; ValueError for NaN and infinities, unless they are allowed."""
    text = json.dumps(value, indent=2, sort_keys=sort_keys, ensure_ascii=ensure_ascii, allow_nan=allow_nan)
    return f"{text}\n"


def nearest_folder(path: Path) -> Path:
    """Return the folder at a path, or the nearest existing one above it."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())


def make_folder(path: Path) -> None:
    """Make a folder and its parents, unless they exist.

    Raises:
        OSError: The system refuses, or there are more of them below each other than Python's own functions can follow.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except RecursionError:  # pathlib makes one folder inside another by calling itself
        raise OSError(errno.ENAMETOOLONG, "it has too many folders below each other", str(path)) from None


@contextmanager
def made_folder(path: Path) -> Iterator[None]:
    """Make a folder and its parents for a block, as `make_folder`; afterwards, remove those of them that are empty."""
    absent = [folder for folder in (path, *path.absolute().parents) if not folder.exists()]
    try:
        make_folder(path)
        yield
    finally:
        for folder in absent:
            with suppress(OSError):
                folder.rmdir()


def sync_folder(path: Path) -> None:
    """Force a folder's entries to disk, so that a rename survives a power failure."""
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
    """Parse one JSON object; raises like `parse_json`, and ValueError for any other value."""
    value = parse_json(text)
    if not isinstance(value, dict):
        raise ValueError(f"it is a {type(value).__name__}, not an object")
    return value


def parse_json_at(text: str, at: int) -> tuple[Any, int]:
    """Parse the value that begins at an offset; return it and the offset after it. Raises like `parse_json`."""
    try:
        return json.JSONDecoder().raw_decode(text, at)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def read_text(path: Path, *, max_bytes: int = MAX_FOREIGN_BYTES) -> str:
    """Read a UTF-8 text file without blocking: a pipe without a writer is empty, and an endless device is too large.

    Raises:
        OSError: If it cannot be read.
        ValueError: If it is not UTF-8, or larger than `max_bytes`.
    """
    with open(path, "rb", opener=_open_at_once) as file:
        os.set_blocking(file.fileno(), True)
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"it has more than {max_bytes} bytes")
    return content.decode("utf-8")


def _open_at_once(path: str, flags: int) -> int:
    """Open a file without blocking if it is a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


def read_json_object(path: Path, *, max_bytes: int = MAX_FOREIGN_BYTES) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        OSError, ValueError: It cannot be read, is larger than `max_bytes`, is not JSON, or holds another value.
    """
    return parse_object(read_text(path, max_bytes=max_bytes))


def read_plain_object(folder: Path, name: str) -> dict[str, Any]:
    """Read a regular file inside a folder that holds one JSON object.

    Raises:
        OSError, ValueError: It cannot be read, is not JSON in UTF-8, or holds another value.
    """
    return parse_object(read_plain(folder, name, max_bytes=MAX_TEXT_BYTES).decode("utf-8"))


def plain_file(folder: Path, name: str) -> Path:
    """Return the path of a regular file inside a folder, with links resolved.

    Args:
        folder: Folder that must contain the file.
        name: Path of the file relative to the folder.

    Raises:
        OSError: If it is missing, lies outside, or is not a regular file: a pipe or a device could be read without end.
        ValueError: If the name is not a valid file name.
    """
    path = folder / name
    mode = path.stat().st_mode
    if not path.resolve().is_relative_to(folder.resolve()):
        raise OSError("points outside the folder")
    if not stat.S_ISREG(mode):
        kind = next((kind for is_kind, kind in _KINDS if is_kind(mode)), "device")
        raise OSError(f"is a {kind}, not a regular file")
    return path


def open_plain(folder: Path, name: str) -> BinaryIO:
    """Open a regular file inside a folder for reading; raises like `plain_file`."""
    file = open(plain_file(folder, name), "rb", opener=_open_at_once)  # noqa: SIM115 - the caller closes it
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # it has been replaced meanwhile
        file.close()
        raise OSError("is not a regular file")
    return file


def read_plain(folder: Path, name: str, *, max_bytes: int) -> bytes:
    """Read a regular file inside a folder.

    Raises:
        OSError: As in `plain_file`, or if it is larger than `max_bytes`.
    """
    with open_plain(folder, name) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(f"has more than {max_bytes} bytes")
    return content
