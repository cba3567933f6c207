"""A report in SARIF 2.1.0, which CI systems show beside the lines of a file (OASIS Standard, sarif-v2.1.0)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from toolkit.user_files.read import TEXT_NAME
from toolkit.user_files.report import Found, Report
from toolkit.version import version_of

_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def sarif(report: Report) -> dict[str, Any]:
    """Return a report as a SARIF log with one run; rules are the codes of docs/errors.md."""
    codes = list(dict.fromkeys(each.code for each in report.found))
    return {
        "$schema": _SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "toolkit validate",
                        "version": version_of("accelerator-toolkit") or "0",
                        "rules": [_rule(code) for code in codes],
                    }
                },
                "columnKind": "unicodeCodePoints",
                "results": [_result(each, codes.index(each.code)) for each in report.found],
            }
        ],
    }


def _rule(code: str) -> dict[str, Any]:
    """Return a rule with its row in docs/errors.md; with the words of its code where the page is not installed."""
    text = code_texts().get(code)
    rule: dict[str, Any] = {"id": code, "shortDescription": {"text": code.replace("_", " ").capitalize()}}
    if text is not None:
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
        rule |= {
            "fullDescription": {"text": plain.replace("`", "")},
            "help": {"text": f"{plain.replace('`', '')} See {code} in docs/errors.md.", "markdown": plain},
        }
    return rule


@cache
def code_texts() -> Mapping[str, str]:
    """Return what docs/errors.md says of each code."""
    package = Path(__file__).parents[1]
    page = next(
        (each for each in (package / "_errors.md", package.parent / "docs" / "errors.md") if each.is_file()), None
    )
    rows = () if page is None else re.findall(r"(?m)^\| `([A-Z][A-Z0-9_]+)` \| (.*) \|$", page.read_text("utf-8"))
    return dict(rows)


def _result(found: Found, index: int) -> dict[str, Any]:
    origin = f" ({found.source})" if found.source else ""
    result: dict[str, Any] = {
        "ruleId": found.code,
        "ruleIndex": index,
        "level": found.level,
        "message": {"text": f"{found.message}{origin}. {found.fix}."},
        "properties": {"key": found.key, "value": found.value},
    }
    if found.file != TEXT_NAME:
        location: dict[str, Any] = {"artifactLocation": {"uri": _uri(found.file)}}
        if found.line is not None:
            location["region"] = {"startLine": found.line}
        result["locations"] = [{"physicalLocation": location}]
    return result


def _uri(name: str) -> str:
    path = Path(name)
    return path.as_uri() if path.is_absolute() else quote(path.as_posix())
