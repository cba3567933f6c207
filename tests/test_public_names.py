"""`import toolkit as tk` offers functions, whatever has been imported before."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest

import toolkit as tk


def test_no_package_shares_its_name_with_a_function():
    shared = {module.name for module in pkgutil.iter_modules(tk.__path__)} & set(tk.__all__)
    assert {name: getattr(tk, name) for name in shared} == {name: sys.modules[f"toolkit.{name}"] for name in shared}


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
