"""Errors for a failed write: the disk is full, a file is larger than the process may write, or the folder cannot be written."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from toolkit.errors import RunError
from toolkit.io import nearest_folder
from toolkit.units import format_bytes

LIFT_LIMIT = "Raise the limit with `ulimit -f unlimited`, or write to a file system that supports larger files"

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

# torch.save's zip writer reports a short write by these texts (caffe2/serialize/inline_container.cc), without the system's reason.
_ZIP_WRITER_SIGNS = ("PytorchStreamWriter", "unexpected pos", "file write failed")
# safetensors reports the system's reason as Rust prints it: "I/O error: File too large (os error 27)".
_RUST_ERROR = re.compile(r"\(os error (\d+)\)")


@contextmanager
def disk_errors(target: Path) -> Iterator[None]:
    """Turn a failed write of `target` into an error that says what is kept and what to do.

    Raises:
        RunError: DISK_FULL, CHECKPOINT_UNWRITABLE.
    """
    try:
        yield
    except Exception as error:
        number = _system_error(error, target)
        if number is None:
            raise
        if number in _FULL:
            what = str(error) if isinstance(error, OSError) else os.strerror(number)
            raise disk_full(target, what, limited=number == errno.EFBIG) from error
        raise RunError.of(
            code="CHECKPOINT_UNWRITABLE",
            key=str(target),
            message=f"{target} cannot be written: {error}",
            fix="Check the folder's permissions, or set train.output_dir to another one",
        ) from error


def disk_full(target: Path, what: str, *, limited: bool = False) -> RunError:
    """Return the error of a disk without room for `target`.

    Args:
        target: File or folder that was to be written.
        what: Reason.
        limited: Whether a single file grew too large, and not all of them together.
    """
    return RunError.of(
        code="DISK_FULL",
        key=str(target),
        message=f"{target} cannot be saved: {file_limit() or what if limited else what}",
        fix=f"{LIFT_LIMIT if limited else 'Free space or lower train.save_total_limit'}, then resume; checkpoints saved "
        "before are untouched",
    )


def file_limit() -> str | None:
    """Return a sentence that states the largest file that this process may write; None without a limit."""
    limit = _file_limit_bytes()
    return None if limit is None else f"no file may be larger than {format_bytes(limit)} here, the limit of `ulimit -f`"


def _file_limit_bytes() -> int | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return None if limit == resource.RLIM_INFINITY else limit


def _system_error(error: Exception, target: Path) -> int | None:
    """Return the number of the system's error behind an exception; None if it is not of a failed write."""
    if isinstance(error, OSError):
        return error.errno or errno.EIO
    if type(error).__name__ == "SafetensorError" and (found := _RUST_ERROR.search(str(error))):
        return int(found[1])
    if isinstance(error, RuntimeError) and any(sign in str(error) for sign in _ZIP_WRITER_SIGNS):
        limit = _file_limit_bytes()
        has_room = limit is not None and shutil.disk_usage(nearest_folder(target)).free > limit
        return errno.EFBIG if has_room else errno.ENOSPC
    return None
