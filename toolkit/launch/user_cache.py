"""The folders in which the toolkit keeps, for this user, what it can make again and what was measured."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

# Environment variable; any value but the empty one has nothing read or kept there.
NO_CACHE_SWITCH = "TOOLKIT_NO_CACHE"


def user_cache_folder() -> Path | None:
    """Return the folder, which need not exist; None where nothing may be kept.

    Source:
        XDG Base Directory Specification 0.8: a relative XDG_CACHE_HOME is ignored.
    """
    if os.environ.get(NO_CACHE_SWITCH):
        return None
    set_to = Path(os.environ.get("XDG_CACHE_HOME", ""))
    base = set_to if set_to.is_absolute() else Path(os.environ.get("HOME", "/")) / ".cache"
    return base / "accelerator-toolkit"


def own_temporary_folder() -> Path | None:
    """Return this user's folder of temporary files, made now; None where another user has a folder of its name or can write to it.

    All users make files in the folder of temporary files, so what is found there by name may be another's: a library to load, say.
    """
    folder = Path(tempfile.gettempdir()) / f"accelerator-toolkit-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        return None
    return folder if is_own_folder(folder, alone=True) else None


def is_own_folder(folder: Path, *, alone: bool) -> bool:
    """Return whether this is a folder of this user's, and no link to one.

    Args:
        folder: Folder in a place where all users make files.
        alone: Whether no other user may be able to write to it.
    """
    try:
        status = folder.lstat()
    except OSError:
        return False
    others = stat.S_IWGRP | stat.S_IWOTH if alone else 0
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & others


def user_config_folder() -> Path:
    """Return the folder of what was measured on this machine, which need not exist (XDG Base Directory Specification)."""
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")  # noqa: PTH111, PTH118
    return Path(base) / "toolkit"
