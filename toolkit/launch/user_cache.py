"""The folders in which the toolkit keeps, for this user, what it can make again and what was measured."""

from __future__ import annotations

import os
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


def user_config_folder() -> Path:
    """Return the folder of what was measured on this machine, which need not exist (XDG Base Directory Specification)."""
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")  # noqa: PTH111, PTH118
    return Path(base) / "toolkit"
