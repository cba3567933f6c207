"""A lock without an owner is named; a fresh one, of a compilation under way, is left alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from toolkit.errors import RunError
from toolkit.groups.build_locks import STALE_SECONDS, check_build_locks


def test_a_stale_lock_is_named(tmp_path: Path) -> None:
    lock = tmp_path / "py311_cpu" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    environment = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    check_build_locks(environment)
    os.utime(lock, (1.0, 1.0))
    with pytest.raises(RunError, match=f"rm {lock}") as caught:
        check_build_locks(environment, now=2.0 + STALE_SECONDS)
    assert caught.value.codes == ("BUILD_LOCK",)


def test_no_folder_is_no_problem(tmp_path: Path) -> None:
    check_build_locks({"HOME": str(tmp_path)})
