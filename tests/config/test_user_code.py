"""Python of the user's is found without being run, and imported with one error."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from toolkit.config.job import Train
from toolkit.config.user_code import find_beside, imported, unfound
from toolkit.errors import SpecError

CODE = """
import json as other
raise_if_run = open("ran", "w")
class Mine: ...
def metric(run): ...
value = 3
"""


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("found_here", "broken_here", "ending_here", "star_here"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "found_here.py").write_text(CODE)
    (tmp_path / "broken_here.py").write_text("class Mine: ...\n1 / 0\n")
    (tmp_path / "ending_here.py").write_text("class Mine: ...\nraise SystemExit(4)\n")
    (tmp_path / "star_here.py").write_text("from found_here import *\n")
    (tmp_path / "spoiled_here.py").write_text("class :\n")
    find_beside(tmp_path / "job.yaml")
    return tmp_path


def test_what_a_module_defines_is_found_without_running_it(beside: Path) -> None:
    for name in ("found_here:Mine", "found_here:metric", "found_here:other", "star_here:Whatever", "json:dumps"):
        assert list(unfound("train.callbacks", name)) == []
    assert not (beside / "ran").exists()
    assert sys.path[-1] == str(beside), "after all others: it hides no library"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("found_here:Yours", "defines no Yours"),
        ("absent_here:Mine", "there is no module absent_here"),
        ("absent_here.deeper:Mine", "ModuleNotFoundError"),
        ("spoiled_here:Mine", "SyntaxError"),
    ],
)
def test_what_is_not_there(beside: Path, name: str, reason: str) -> None:
    (problem,) = unfound("train.callbacks", name)
    assert (problem.code, problem.key) == ("USER_CODE", "train.callbacks")
    assert reason in problem.message
    with pytest.raises(SpecError) as caught:
        imported("train.callbacks", name)
    assert caught.value.codes == ("USER_CODE",)


def test_an_import_that_raises_is_one_error(beside: Path) -> None:
    assert list(unfound("train.callbacks", "broken_here:Mine")) == []
    with pytest.raises(SpecError, match="ZeroDivisionError"):
        imported("train.callbacks", "broken_here:Mine")
    with pytest.raises(SpecError, match="SystemExit: 4"):
        imported("train.callbacks", "ending_here:Mine")
    assert imported("train.callbacks", "found_here:metric").__name__ == "metric"
    with pytest.raises(SpecError, match="neither a class nor a function"):
        imported("train.callbacks", "found_here:value")


@pytest.mark.parametrize("name", ["module", "module:", ":name", "a-b:c", "a:b.c", 3])
def test_the_form_of_a_name(name: object) -> None:
    with pytest.raises(SpecError, match="module:name"):
        Train(callbacks=[name])
