"""The folder in which the toolkit keeps, for this user, what it can make again."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache_folder() -> Path:
    """Return the folder, which need not exist.

    Source:
        XDG Base Directory Specification 0.8: a relative XDG_CACHE_HOME is ignored.
    """
    set_to = Path(os.environ.get("XDG_CACHE_HOME", ""))
    base = set_to if set_to.is_absolute() else Path(os.environ.get("HOME", "/")) / ".cache"
    return base / "accelerator-toolkit"
