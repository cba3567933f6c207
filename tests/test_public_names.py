"""`import toolkit as tk` offers functions, whatever has been imported before."""

from __future__ import annotations

import subprocess
import sys

import pytest

import toolkit as tk

SHARED = ["emit", "export", "train"]


@pytest.mark.parametrize("name", SHARED)
def test_a_function_stays_one_once_the_package_of_its_name_is_loaded(name):
    program = f"""
import importlib, types
import toolkit as tk
package = importlib.import_module("toolkit.{name}")
assert isinstance(package, types.ModuleType)
for _ in range(2):
    assert isinstance(tk.{name}, types.FunctionType), tk.{name}
from toolkit import {name}
assert isinstance({name}, types.FunctionType)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_estimate_of_the_memory_package_is_the_function():
    program = """
import sys, types
import toolkit as tk
import toolkit.memory
assert "torch" not in sys.modules
import toolkit.memory.estimate
assert isinstance(toolkit.memory.estimate, types.FunctionType)
assert toolkit.memory.estimate is tk.estimate
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_name_is_there():
    for name in tk.__all__:
        assert getattr(tk, name) is not None
    assert set(dir(tk)) == set(tk.__all__)


def test_a_name_may_be_replaced_in_a_test(monkeypatch):
    monkeypatch.setattr(tk, "train", len)
    assert tk.train("abc") == 3


def test_another_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nothing"):
        tk.nothing  # noqa: B018
