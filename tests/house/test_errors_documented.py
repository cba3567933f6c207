"""`docs/errors.md` explains exactly the codes that the code can raise."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*")
ROW = re.compile(r"^\| `([^`]+)` \|", re.MULTILINE)


def raised_codes() -> dict[str, str]:
    """Maps each string that is passed as `code=` to the place of one call."""
    codes = {}
    for path in sorted((ROOT / "toolkit").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for keyword in node.keywords if isinstance(node, ast.Call) else ():
                if keyword.arg != "code":
                    continue
                for value in ast.walk(keyword.value):
                    if isinstance(value, ast.Constant) and isinstance(value.value, str):
                        codes[value.value] = f"{path.relative_to(ROOT)}:{value.lineno}"
    return codes


def test_codes_are_upper_snake():
    codes = raised_codes()
    assert codes
    assert {code: place for code, place in codes.items() if not CODE.fullmatch(code)} == {}


def test_the_documented_codes_are_those_that_the_code_raises():
    raised = raised_codes()
    documented = ROW.findall((ROOT / "docs" / "errors.md").read_text(encoding="utf-8"))
    assert len(documented) == len(set(documented)), "a code has two rows"
    undocumented = {code: place for code, place in raised.items() if code not in documented}
    assert undocumented == {}, "raised, but docs/errors.md has no row"
    assert set(documented) - set(raised) == set(), "docs/errors.md has a row, but nothing raises it"
