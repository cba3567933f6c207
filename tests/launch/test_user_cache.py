"""The user's cache folder."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from toolkit.launch.user_cache import own_temporary_folder, user_cache_folder


def test_the_folder_is_that_of_the_platform_or_of_the_user(monkeypatch):
    monkeypatch.setenv("TOOLKIT_NO_CACHE", "")
    monkeypatch.setenv("HOME", "/someone")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert user_cache_folder() == Path("/someone/.cache/accelerator-toolkit")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert user_cache_folder() == Path("/someone/.cache/accelerator-toolkit")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert user_cache_folder() == Path("/elsewhere/accelerator-toolkit")
    monkeypatch.setenv("TOOLKIT_NO_CACHE", "1")
    assert user_cache_folder() is None


def test_a_folder_of_temporary_files_is_the_users_own(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = own_temporary_folder()
    assert folder == own_temporary_folder() == tmp_path / f"accelerator-toolkit-{os.getuid()}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o770)
    assert own_temporary_folder() is None, "others of its group can write there"
    folder.rmdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder.symlink_to(elsewhere)
    assert own_temporary_folder() is None
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    assert own_temporary_folder() is None


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to make another user's folder")
def test_what_another_user_has_made_there_is_not_used(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = own_temporary_folder()
    os.chown(folder, 12345, -1)
    assert own_temporary_folder() is None
