"""data.chat_template: what it may name, and when it is of no use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from toolkit import bounded
from toolkit.config.job import Data
from toolkit.data.chat_template import set_chat_template
from toolkit.dataset_inspection.chat_template import CHATML_TEMPLATE, read_chat_template, template_problems
from toolkit.dataset_inspection.inspect import peek
from toolkit.errors import DataError


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
    with pytest.raises(DataError, match="it is not a file"):
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


CHAT = {"messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% for m in messages %}\n{{ m.content }", "line 2: unexpected"),
        ("{% for m in messages %}{{ m.content }}", "line 1: Unexpected end of template"),
        ("{% frobnicate %}", "unknown tag 'frobnicate'"),
        ("{% generation %}{{ messages }}", "line 1: Unexpected end of template"),
        ("{{ messages | shout }}", "No filter named 'shout'"),
        ("{% break %}", "'break' outside loop"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "nested too deep"),
    ],
)
def test_a_slip_in_a_template_is_told_before_the_run_as_the_run_would_tell_it(tmp_path: Path, template, says) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(CHAT) + "\n")
    (tmp_path / "mine.jinja").write_text(template)
    data = Data(train="a.jsonl", chat_template="mine.jinja")
    (problem,) = peek(data, base=tmp_path)[1]
    assert (problem.code, problem.key) == ("DATA_CHAT_TEMPLATE_FILE", "data.chat_template")
    assert says in problem.message
    with pytest.raises(DataError) as caught:
        set_chat_template(tokenizer(), data, base=tmp_path)
    assert caught.value.problems == (problem,)


@pytest.mark.parametrize(
    "template",
    [
        CHATML_TEMPLATE,
        "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m | tojson(indent=2) }}{% endfor %}",
        "{% set ns = namespace(x=1) %}{{ raise_exception('no') if messages[0].role == 'system' }}{{ strftime_now('%Y') }}",
        "{% macro shown(m) %}{{ m.content | trim }}{% endmacro %}{{ shown(messages[0]) }}",
    ],
)
def test_what_transformers_takes_is_taken(tmp_path: Path, template: str) -> None:
    assert template_problems("mine.jinja", template) == []
    (tmp_path / "mine.jinja").write_text(template)
    set_chat_template(tokenizer(), Data(train="a.jsonl", chat_template="mine.jinja"), base=tmp_path)


def tokenizer() -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")))


def test_a_constant_that_takes_for_ever_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jinja computes it when it compiles, before anything is rendered."""
    monkeypatch.setattr(bounded, "SECONDS", 1)
    (problem,) = template_problems("mine.jinja", "{{ 9 ** (9 ** (9 ** 9)) }}")
    assert problem.code == "DATA_CHAT_TEMPLATE_FILE"
    assert "mine.jinja: compiling it takes more than " in problem.message
