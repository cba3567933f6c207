"""Locks that a killed compilation of DeepSpeed's kernels left behind, for which the next run would wait for ever."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from toolkit.errors import Problem, RunError, raise_all

# DeepSpeed's slowest extension compiles in about two minutes, async_io seven on two cores; a lock this old has no owner.
STALE_SECONDS = 900.0


def check_build_locks(environment: Mapping[str, str], *, now: float | None = None) -> None:
    """Refuses to start while a lock lies there that nobody will take away.

    Args:
        environment: Gives TORCH_EXTENSIONS_DIR, or HOME for its default.
        now: Seconds since the epoch; the clock's when left out.

    Raises:
        RunError: BUILD_LOCK, naming each lock.

    Source:
        torch utils/file_baton.py FileBaton.wait, utils/cpp_extension.py _get_build_directory.
    """
    moment = time.time() if now is None else now
    problems = []
    for lock in sorted(extensions_folder(environment).glob("**/lock")):
        try:
            age = moment - lock.stat().st_mtime
        except OSError:  # its owner has just removed it
            continue
        if age > STALE_SECONDS:
            problems.append(
                Problem(
                    code="BUILD_LOCK",
                    key=str(lock),
                    message=f"{lock} is {age / 60:.0f} minutes old: a compilation was killed, and DeepSpeed would wait for it for ever",
                    fix=f"Delete it: rm {lock}",
                    source="torch utils/file_baton.py",
                )
            )
    raise_all(RunError, problems)


def extensions_folder(environment: Mapping[str, str]) -> Path:
    """Gives the folder below which torch compiles extensions."""
    root = environment.get("TORCH_EXTENSIONS_DIR")
    return Path(root) if root else Path(environment.get("HOME", "/")) / ".cache" / "torch_extensions"
