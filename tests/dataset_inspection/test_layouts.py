"""Alpaca and ShareGPT are read as they are published; what nothing reads is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from toolkit.config.job import Data
from toolkit.dataset_inspection.inspect import peek
from toolkit.dataset_inspection.layouts import ALPACA, ALPACA_CHAT, LAYOUTS, SHAREGPT, fitting_layouts

# Records of tatsu-lab/alpaca and their `text` columns.
TIPS = {"instruction": "Give three tips for staying healthy.", "input": "", "output": "1. Eat well."}
TIPS_TEXT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\nGive three tips for staying healthy.\n\n### Response:\n1. Eat well."
)
ODD = {"instruction": "Identify the odd one out.", "input": "Twitter, Instagram, Telegram", "output": "Telegram"}
ODD_TEXT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a response "
    "that appropriately completes the request.\n\n### Instruction:\nIdentify the odd one out.\n\n### Input:\nTwitter, "
    "Instagram, Telegram\n\n### Response:\nTelegram"
)
TURNS = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]


@pytest.fixture
def look(tmp_path: Path) -> Any:
    def look(*records: dict[str, Any], **data: Any) -> Any:
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return peek(Data(train="a.jsonl", **data), base=tmp_path)

    return look


@pytest.mark.parametrize(("record", "text"), [(TIPS, TIPS_TEXT), (ODD, ODD_TEXT)])
def test_an_alpaca_record_is_the_text_that_it_is_published_with(record: dict[str, Any], text: str) -> None:
    assert ALPACA.convert is not None
    pair = ALPACA.convert(record)
    assert pair["prompt"] + pair["completion"] == text
    assert pair["completion"] == record["output"]


def test_an_alpaca_record_as_a_conversation() -> None:
    assert ALPACA_CHAT.convert is not None
    assert ALPACA_CHAT.convert(ODD)["messages"] == [
        {"role": "user", "content": "Identify the odd one out.\n\nTwitter, Instagram, Telegram"},
        {"role": "assistant", "content": "Telegram"},
    ]


def test_a_sharegpt_record_is_messages() -> None:
    assert SHAREGPT.convert is not None
    said = [{"role": "user", "content": "hi", "train": None}, {"role": "assistant", "content": "yo", "train": None}]
    assert SHAREGPT.convert({"conversations": TURNS, "system": ""}) == {"messages": said}
    assert SHAREGPT.convert({"conversations": TURNS, "system": "Be brief."}) == {
        "messages": [{"role": "system", "content": "Be brief.", "train": None}, *said]
    }
    assert SHAREGPT.convert({"conversations": said}) == {"messages": said}
    marked = [TURNS[0], {**TURNS[1], "weight": 0}, {**TURNS[1], "train": True}]
    assert [message["train"] for message in SHAREGPT.convert({"conversations": marked})["messages"]] == [
        None,
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("record", "format_", "found"),
    [
        (TIPS, "auto", "prompt_completion"),
        ({"instruction": "a", "output": "b"}, "auto", "prompt_completion"),
        (TIPS, "prompt_completion", "prompt_completion"),
        (TIPS, "messages", "messages"),
        ({"id": 1, "conversations": TURNS}, "auto", "messages"),
    ],
)
def test_the_format_that_columns_make(look: Any, record: dict[str, Any], format_: Any, found: str) -> None:
    facts, problems = look(record, format=format_)
    assert (problems, facts.format, facts.warnings) == ((), found, ())


def test_published_alpaca_has_a_text_column_too(look: Any) -> None:
    _, (problem,) = look(TIPS | {"text": TIPS_TEXT})
    assert (problem.code, problem.fix) == ("DATA_FORMAT", "Set data.format to one of text, prompt_completion")
    assert look(TIPS | {"text": TIPS_TEXT}, format="prompt_completion")[1] == ()


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (TIPS | {"output": None}, "output is absent or null, not a string"),
        (TIPS | {"input": ["a"]}, "input is a list, not a string"),
        ({"conversations": "hi"}, "conversations is a string, not a list of {from, value}"),
        ({"conversations": []}, "conversations is an empty list"),
        ({"conversations": ["hi"]}, "conversations[0] is a string"),
        (
            {"conversations": [{"from": "robot", "value": "x"}]},
            "conversations[0].from is 'robot', none of human, user, gpt",
        ),
        ({"conversations": [*TURNS, {"from": "human"}]}, "conversations[2].value is absent"),
        ({"conversations": TURNS, "system": 3}, "system is a number"),
    ],
)
def test_faults_name_the_columns_as_they_are(look: Any, record: dict[str, Any], says: str) -> None:
    _, (problem,) = look(record)
    assert problem.code == "DATA_TYPE"
    assert says in problem.message
    assert "instruction" in problem.fix or "conversations" in problem.fix


@pytest.mark.parametrize(
    ("record", "column"),
    [
        ({"prompt": "a", "input": "b", "completion": "c"}, "input"),
        ({"conversations": TURNS, "tools": "[f]"}, "tools"),
        (TIPS | {"history": [["a", "b"]]}, "history"),
    ],
)
def test_context_that_nothing_reads_is_said(look: Any, record: dict[str, Any], column: str) -> None:
    facts, problems = look(record)
    assert problems == ()
    (warning,) = facts.warnings
    assert f"a.jsonl: the column {column} is not used" in warning


@pytest.mark.parametrize("value", ["", None, []])
def test_empty_context_and_other_columns_are_no_loss(look: Any, value: Any) -> None:
    facts, _ = look({"prompt": "a", "completion": "c", "input": value, "id": 7, "source": "web"})
    assert facts.warnings == ()


def test_at_most_one_layout_a_format() -> None:
    every = tuple({column for layout in LAYOUTS for column in layout.reads})
    for wanted in ("auto", "messages"):
        formats = [layout.format for layout in fitting_layouts(every, wanted)]
        assert formats == ["text", "prompt_completion", "messages"]
