"""`import toolkit as tk` offers functions, whatever has been imported before."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from types import FunctionType, ModuleType

import pytest

import toolkit as tk
import toolkit.memory


@pytest.mark.parametrize("name", ["emit", "export", "train", "memory.estimate"])
def test_a_function_stays_one_once_the_package_of_its_name_is_loaded(name, monkeypatch):
    function = name.rpartition(".")[2]
    for _ in range(2):
        monkeypatch.delitem(sys.modules, f"toolkit.{name}", raising=False)
        assert isinstance(import_module(f"toolkit.{name}"), ModuleType)
        assert isinstance(getattr(tk, function), FunctionType)
    assert isinstance(toolkit.memory.estimate, FunctionType)


def test_the_packages_of_functions_load_no_torch():
    program = (
        "import sys, toolkit, toolkit.memory, toolkit.artifacts, toolkit.trainer; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


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
