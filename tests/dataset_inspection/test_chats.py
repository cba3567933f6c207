"""What `validate` sees of conversations: marks, unread keys, and what their template leaves out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from toolkit import bounded
from toolkit.config.job import Data
from toolkit.dataset_inspection import chats
from toolkit.dataset_inspection.chat_template import CHATML_TEMPLATE, ChatTemplate, TemplateRefusalError
from toolkit.dataset_inspection.inspect import DatasetFacts, peek
from toolkit.errors import Problem

ASKED = {"role": "user", "content": "weather?"}
CALLING = [
    ASKED,
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
    {"role": "tool", "content": "sunny", "tool_call_id": "1"},
    {"role": "assistant", "content": "It is sunny"},
]
SHOWS_CALLS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content or '' }}{% for call in m.tool_calls or [] %}{{ call | tojson }}"
    "{% endfor %}{% endfor %}"
)


def look(
    folder: Path, *conversations: Any, template: str | None = None, column: str = "messages", **data: Any
) -> tuple[DatasetFacts, tuple[Problem, ...]]:
    lines = [json.dumps({column: messages}) for messages in conversations]
    (folder / "a.jsonl").write_text("\n".join(lines))
    own = None if template is None else ChatTemplate(template, "<eos>")
    return peek(Data(train="a.jsonl", **data), base=folder, template=own)


@pytest.mark.parametrize(("own", "named"), [(None, "chatml"), (CHATML_TEMPLATE, None), (SHOWS_CALLS, "chatml")])
def test_a_call_that_vanishes_is_refused(tmp_path: Path, own: str | None, named: str | None) -> None:
    _, problems = look(tmp_path, [ASKED], CALLING, CALLING, template=own, chat_template=named)
    (problem,) = problems
    assert (problem.code, problem.key) == ("DATA_CHAT_DROPPED", "data.train")
    assert problem.message.startswith("a.jsonl, record at line 2: the chat template leaves out messages[1].tool_calls,")


def test_a_template_that_shows_all_is_sound_and_what_none_can_tell_is_left_to_training(tmp_path: Path) -> None:
    for template in (SHOWS_CALLS, None):
        facts, problems = look(tmp_path, CALLING, template=template)
        assert problems == ()
        # Which call an answer belongs to: order says it as well, but it is said that the template does not.
        assert bool(facts.warnings) == (template is not None)
    (warning,) = look(tmp_path, CALLING, template=SHOWS_CALLS)[0].warnings
    assert "tool_call_id (1 ×)" in warning
    assert look(tmp_path, CALLING, template=SHOWS_CALLS + "{# tool_call_id #}")[0].warnings == ()


def test_unknown_keys_are_named_once_with_their_number(tmp_path: Path) -> None:
    chat = [
        {**ASKED, "id": 1, "score": None},
        {"role": "assistant", "content": "a", "id": 2, "model": "m", "weight": 1},
    ]
    (warning,) = look(tmp_path, chat, chat, chat_template="chatml")[0].warnings
    assert "a.jsonl: its messages have unused keys: id (4 ×), model (2 ×) in the first 2 records" in warning
    turns = [{"from": "human", "value": "a", "id": 1}, {"from": "gpt", "value": "b", "train": False}]
    (warning,) = look(tmp_path, turns, column="conversations")[0].warnings
    assert "id (1 ×) in" in warning


@pytest.mark.parametrize(
    ("messages", "column", "says"),
    [
        ([ASKED, {"role": "assistant", "content": "a", "weight": 2}], "messages", "messages[1].weight is 2, neither 0 nor 1"),
        ([{**ASKED, "train": True}], "messages", "messages[0].train=true asks to train on the messages of user"),
        ([{"from": "gpt", "value": "a", "train": "no"}], "conversations", "conversations[0].train is 'no'"),
        ([{"from": "gpt", "value": "a", "tool_calls": [{}]}], "conversations", "conversations[0].tool_calls is not part of ShareGPT"),
    ],
)  # fmt: skip
def test_marks_that_say_nothing_clear_are_refused(tmp_path: Path, messages: Any, column: str, says: str) -> None:
    good = [{"from": "human", "value": "a"}] if column == "conversations" else [ASKED]
    _, (problem,) = look(tmp_path, good, messages, column=column, loss_on="assistant")
    assert problem.code == "DATA_TYPE"
    assert "a.jsonl, record at line 2: " in problem.message
    assert says in problem.message


def test_what_a_template_refuses_is_said_before_training(tmp_path: Path) -> None:
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}{{ messages }}"
    system = {"role": "system", "content": "Be kind."}
    _, (problem,) = look(tmp_path, [ASKED], [system, ASKED], template=strict)
    assert problem.code == "DATA_CHAT_TEMPLATE"
    assert "record at line 2: the chat template does not render it: no system role" in problem.message
    # What transformers may know better is left to it.
    assert look(tmp_path, [ASKED], template="{{ strftime_later() }}")[1] == ()
    assert look(tmp_path, [ASKED], template="{{ bos_token + messages[0].content }}")[1] == ()
    _, (problem,) = look(tmp_path, [ASKED], template="{{ messages[0].x.y }}")
    assert (problem.code, problem.key) == ("DATA_CHAT_TEMPLATE", "data.train")
    assert (
        "record at line 1: the chat template does not render it: 'dict object' has no attribute 'x'" in problem.message
    )
    assert look(tmp_path, [ASKED], template="{% for %}")[1][0].code == "DATA_CHAT_TEMPLATE"


def test_a_template_renders_as_transformers_does() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    template = (
        "{%- for m in messages %}\n  {% if loop.first %}{% continue %}{% endif %}\n{{ m | tojson }}{{ eos_token }}"
        "{% generation %}{{ '<' }}{{ m.content | trim }}{% endgeneration %}{% endfor %}{{ tools | tojson(indent=2) }}"
    )
    tools = [{"name": "é<"}]
    (expected,), _ = render_jinja_template([CALLING], tools=tools, chat_template=template, eos_token="<eos>")
    assert ChatTemplate(template, "<eos>").render(CALLING, tools) == expected
    with pytest.raises(TemplateRefusalError, match="not today"):
        ChatTemplate("{{ raise_exception('not today') }}").render(CALLING)


LONG = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "template",
    [
        LONG,
        "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n else '' }}{% endmacro %}{{ f(60) }}",
        "{% set two = messages | length * 2 %}{{ 'x' * 10 ** (9 * two) }}",
        "{% set nine = messages | length + 8 %}{{ nine ** (nine ** (nine ** nine)) }}",
        "{% set all = messages[0].content %}{{ all }}" + LONG,
    ],
    ids=["loops", "macros", "memory", "power", "rendered"],
)
def test_a_template_that_takes_for_ever_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    """A stranger's: Jinja's sandbox bounds one range, and neither loops in loops nor numbers nor texts."""
    monkeypatch.setattr(chats, "RENDERING_SECONDS", 1)
    monkeypatch.setattr(bounded, "MEMORY_BYTES", 2**28)
    (tmp_path / "mine.jinja").write_text(template)
    for own, named in ((template, None), (None, "mine.jinja")):
        _, (problem,) = look(tmp_path, [ASKED], CALLING, template=own, chat_template=named)
        assert (problem.code, problem.key) == ("DATA_CHAT_TEMPLATE", "data.train")
        assert problem.message.startswith(
            "a.jsonl, record at line 1: the chat template does not render it: it takes more than 1 s of processor time, or "
        )


@pytest.mark.parametrize(
    ("text", "images", "said"),
    [
        ("<image><image>", ["a.png"], "more places for images than the 1"),
        ("<image>", ["a.png", "b.png"], "only 1 have a place"),
        ("<image>", ["a.png"], None),
    ],
)
def test_images_without_a_place_are_told_before_training(
    tmp_path: Path, text: str, images: list[str], said: str | None
) -> None:
    record = {
        "messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "Yes."}],
        "images": images,
    }
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    shows = (
        "{% for m in messages %}{{ m.role }}{% for c in m.content %}{{ c.type }}{{ c.text }}{% endfor %}{% endfor %}"
    )
    _, problems = peek(Data(train="a.jsonl"), base=tmp_path, template=ChatTemplate(shows, "<eos>", lists=True))
    assert [problem.code for problem in problems] == ([] if said is None else ["DATA_IMAGE"])
    assert said is None or said in str(problems[0])
