"""data.chat_template: what it may name, and when it is of no use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from toolkit.errors import DataError
from toolkit.spec.chat_template import CHATML_TEMPLATE, read_chat_template
from toolkit.spec.dataset import peek
from toolkit.spec.job import Data


def test_chatml_and_a_file(tmp_path: Path) -> None:
    assert read_chat_template("chatml") == CHATML_TEMPLATE
    (tmp_path / "mine.jinja").write_text("{{ messages }}")
    assert read_chat_template("mine.jinja", base=tmp_path) == "{{ messages }}"
    (tmp_path / "chatml").write_text("mine")
    assert read_chat_template("./chatml", base=tmp_path) == "mine"


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "there is no such file"), (b" \n", "it is empty"), (b"\xe9", "utf-8"), (b"x" * 1_000_001, "more than")],
)
def test_no_template(tmp_path: Path, content: Any, says: str) -> None:
    if content is not None:
        (tmp_path / "mine.jinja").write_bytes(content)
    with pytest.raises(DataError, match=says) as caught:
        read_chat_template("mine.jinja", base=tmp_path)
    assert caught.value.codes == ("DATA_CHAT_TEMPLATE_FILE",)
    with pytest.raises(DataError, match="it is no file"):
        read_chat_template(".", base=tmp_path)


@pytest.mark.parametrize(
    ("record", "template", "codes"),
    [
        ({"messages": [{"role": "user", "content": "a"}]}, "chatml", []),
        ({"messages": [{"role": "user", "content": "a"}]}, "gone.jinja", ["DATA_CHAT_TEMPLATE_FILE"]),
        ({"text": "a"}, "chatml", ["DATA_CHAT_TEMPLATE_UNUSED"]),
    ],
)
def test_the_job_is_checked_before_it_runs(tmp_path: Path, record: Any, template: str, codes: list[str]) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n")
    _, problems = peek(Data(train="a.jsonl", chat_template=template), base=tmp_path)
    assert [problem.code for problem in problems] == codes
