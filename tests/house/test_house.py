"""The linters, as tests; mypy, which takes half a minute of a core, is a step of its own in `.ci/run` and a hook of pre-commit."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "command",
    [
        ("ruff", "check", "--no-cache", "--output-format=concise", "."),
        ("ruff", "format", "--no-cache", "--check", "."),
    ],
    ids=["ruff check", "ruff format"],
)
def test_the_tree_is_clean(command):
    if importlib.util.find_spec(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    result = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
