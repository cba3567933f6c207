"""Tests of times see the catalogue's figures, not those that the machine that tests has learned."""

import pytest


@pytest.fixture(autouse=True)
def own_config_folder(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
