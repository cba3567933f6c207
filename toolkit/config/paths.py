"""The kind of file at a path that a job names, with one error if the system refuses to tell."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Literal

from toolkit.errors import SpecError

PathKind = Literal["file", "folder", "other", "absent"]

# Longest excerpt of a path that an error repeats, characters.
_SHOWN_CHARACTERS = 120


def path_kind(path: Path, *, key: str) -> PathKind:
    """Return the kind of file at a path; links are followed.

    Args:
        path: Path to check.
        key: Key of the job that named it, for the error.
    Returns:
        The kind; `other` is a pipe, a socket or a device; `absent` also means a path below a file.
    Raises:
        SpecError: PATH_UNREADABLE, if the system refuses: a path that is too long, a folder without permission, circular
            links, a zero byte. `Path.exists` and similar methods raise for some of these and return False for others.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "absent"
    except (OSError, ValueError) as error:
        raise _refused(path, key, error) from None
    return "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else "other"


def is_file(path: Path, *, key: str) -> bool:
    """Return whether a path is a regular file; raises like `path_kind`."""
    return path_kind(path, key=key) == "file"


def is_folder(path: Path, *, key: str) -> bool:
    """Return whether a path is a folder; raises like `path_kind`."""
    return path_kind(path, key=key) == "folder"


def num_bytes(path: Path, *, key: str) -> int:
    """Return the total size of the regular files at or below a path, in bytes; raises like `path_kind`."""
    below = (Path(folder, name) for folder, _, names in os.walk(path) for name in names)
    try:
        return sum(file.stat().st_size for file in (path, *below) if is_file(file, key=key))
    except OSError as error:
        raise _refused(path, key, error) from None


def shown(path: Path | str) -> str:
    """Return a path for an error message; a long one is shortened to its beginning."""
    text = str(path)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def _refused(path: Path, key: str, error: OSError | ValueError) -> SpecError:
    reason = getattr(error, "strerror", None) or str(error)
    may_not = getattr(error, "errno", None) in (errno.EACCES, errno.EPERM)
    return SpecError.of(
        code="PATH_UNREADABLE",
        key=key,
        message=f"{key}={shown(path)!r} cannot be accessed: {reason}",
        fix="Make it readable for this user, or name another path" if may_not else "Name another path",
    )
