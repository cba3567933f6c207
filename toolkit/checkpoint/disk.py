"""Errors for a failed write: the disk is full, or the folder cannot be written."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from toolkit.errors import RunError, first_line

# EFBIG: file size limit of a process (`ulimit -f`) or of a file system.
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

# torch.save's zip writer reports a short write by these texts (caffe2/serialize/inline_container.cc).
_ZIP_WRITER_SIGNS = ("PytorchStreamWriter", "unexpected pos", "file write failed")


@contextmanager
def disk_errors(target: Path) -> Iterator[None]:
    """Turn a failed write of `target` into an error that says what is kept and what to do.

    Raises:
        RunError: DISK_FULL, CHECKPOINT_UNWRITABLE.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise disk_full(target, str(error)) from error
        raise RunError.of(
            code="CHECKPOINT_UNWRITABLE",
            key=str(target),
            message=f"{target} cannot be written: {error}",
            fix="Check the folder's rights, or set train.output_dir to another one",
        ) from error
    except RuntimeError as error:
        if any(sign in str(error) for sign in _ZIP_WRITER_SIGNS):
            raise disk_full(target, first_line(error)) from error
        raise


def disk_full(target: Path, what: str) -> RunError:
    """Return the error of a disk without room for `target`."""
    return RunError.of(
        code="DISK_FULL",
        key=str(target),
        message=f"{target} cannot be saved: {what}",
        fix="Free space or lower train.save_total_limit, then resume; checkpoints saved before are untouched",
    )
