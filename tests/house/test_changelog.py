"""CHANGELOG.md leads importers of 0.1.0 to modules and names that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
DEFINED = {
    name
    for path in (ROOT / "toolkit").rglob("*.py")
    for name in re.findall(r"\b(?:class|def) (\w+)\b", path.read_text(encoding="utf-8"))
}


def rows(heading: str) -> list[tuple[str, str]]:
    section = TEXT.split(f"### {heading}")[1].split("\n### ")[0]
    found = re.findall(r"^\| (.+?) \| (.+?) \|$", section, re.MULTILINE)[1:]
    assert found
    return found


def modules(cell: str) -> list[str]:
    package, _, names = cell.partition("`: ")
    package = package.strip("`")
    return [f"{package}.{name}" for name in names.split(", ")] if names else [package]


@pytest.mark.parametrize(("old", "new"), rows("Moved packages and modules"))
def test_the_new_modules_exist(old, new):
    for name in modules(new):
        path = ROOT / name.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").exists(), name
    if "`: " in new:
        assert len(modules(old)) == len(modules(new))


@pytest.mark.parametrize(("old", "new"), rows("Renamed classes, functions and arguments"))
def test_the_new_names_exist(old, new):
    names = re.findall(r"`(\w+)`", new)
    assert len(re.findall(r"`(\w+)`", old)) == len(names)
    assert DEFINED.issuperset(names)
