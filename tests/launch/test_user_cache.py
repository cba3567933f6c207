"""The user's cache folder."""

from __future__ import annotations

from pathlib import Path

from toolkit.launch.user_cache import user_cache_folder


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
