"""Tokenising conversations: exact targets, messages that are not to be learned, and nothing that is left out unsaid."""

from __future__ import annotations

import re
from typing import Any

import pytest

from toolkit.data.chats import message_spans
from toolkit.data.formats import Tokeniser, check_tokenizer
from toolkit.dataset_inspection.chat_template import CHATML_TEMPLATE
from toolkit.errors import DataError

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TAGGED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<eos>\n{% endgeneration %}{% else %}{{ m.content }}<eos>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# As reasoning models do: the last turn is given an empty block of thoughts, earlier ones lose theirs.
THINKING = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHAT = [
    {"role": "user", "content": "What is a list?"},
    {"role": "assistant", "content": "A mutable sequence."},
    {"role": "user", "content": "And a tuple?"},
    {"role": "assistant", "content": "An immutable one."},
]


# As Qwen writes them: calls as JSON, the tools that there are in front, thoughts before the answer.
TOOLS = (
    "{% if tools %}<|tools|>{{ tools | tojson }}<eos>\n{% endif %}{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}{% endfor %}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bern", "unit": None}}}
CALLING = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "sunny", "name": "weather", "tool_call_id": "1"},
    {"role": "assistant", "content": "It is sunny."},
]


def run(tokenizer: Any, loss_on: Any, *records: dict[str, Any], **options: Any) -> list[tuple[list[int], list[int]]]:
    batch = {name: [record[name] for record in records] for name in records[0]}
    tokeniser = Tokeniser(tokenizer=tokenizer, format="messages", loss_on=loss_on, **options)
    out = tokeniser(batch, list(range(len(records))))
    return list(zip(out["input_ids"], out["targets"], strict=True))


def counted(tokenizer: Any, document: tuple[list[int], list[int]]) -> str:
    ids, targets = document
    return tokenizer.decode([token for token, target in zip(ids, targets, strict=True) if target])


@pytest.mark.parametrize("template", [CHATML, TAGGED])
def test_chat_on_all_is_the_rendered_template(tokenizer: Any, template: str) -> None:
    tokenizer.chat_template = template
    ids, targets = run(tokenizer, "all", {"messages": CHAT})[0]
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert targets == [1] * len(ids)


@pytest.mark.parametrize("template", [CHATML, TAGGED])
def test_chat_on_assistant_counts_what_the_assistant_says(tokenizer: Any, template: str) -> None:
    tokenizer.chat_template = template
    document = run(tokenizer, "assistant", {"messages": CHAT})[0]
    assert counted(tokenizer, document) == "A mutable sequence.<eos>\nAn immutable one.<eos>\n"


def test_tagged_and_located_turns_agree(tokenizer: Any) -> None:
    tokenizer.chat_template = CHATML
    located = run(tokenizer, "assistant", {"messages": CHAT})
    tokenizer.chat_template = TAGGED
    assert run(tokenizer, "assistant", {"messages": CHAT}) == located


def test_a_template_that_treats_the_last_turn_otherwise(tokenizer: Any) -> None:
    tokenizer.chat_template = THINKING
    document = run(tokenizer, "assistant", {"messages": CHAT})[0]
    assert counted(tokenizer, document) == ("A mutable sequence.<eos>\n<think>\n\n</think>\n\nAn immutable one.<eos>\n")


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ messages | length }}: {% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(DataError, match="DATA_CHAT_TEMPLATE"):
        run(tokenizer, "assistant", {"messages": CHAT})


@pytest.mark.parametrize("loss_on", ["all", "assistant"])
def test_a_template_that_hides_earlier_turns_is_refused(tokenizer: Any, loss_on: str) -> None:
    tokenizer.chat_template = "{{ messages | length }}: {{ messages[-1].content }}"
    with pytest.raises(DataError, match=r"leaves out messages\[0\]\.content"):
        run(tokenizer, loss_on, {"messages": CHAT})


def test_spans_lie_where_the_assistant_speaks() -> None:
    def render(upto: int, *, add_generation_prompt: bool = False) -> str:
        said = "".join(f"[{message['role'][0]}]{message['content']};" for message in CHAT[:upto])
        return said + "[a]" * add_generation_prompt

    whole = render(len(CHAT))
    assert [whole[start:stop] for start, stop in message_spans(CHAT, render, [1, 3])] == [
        "A mutable sequence.;",
        "An immutable one.;",
    ]


def test_nulls_that_arrow_fills_in_do_not_reach_the_template(tokenizer: Any) -> None:
    tokenizer.chat_template = "{% for m in messages %}{{ m.keys() | list }}{{ m.content }}{% endfor %}"
    filled = [{**message, "tool_calls": None} for message in CHAT[:1]]
    ids, _ = run(tokenizer, "all", {"messages": filled})[0]
    assert tokenizer.decode(ids) == "['role', 'content']What is a list?"


def test_a_tokenizer_without_offsets_finds_no_answers(tokenizer: Any) -> None:
    class Slow(type(tokenizer)):  # type: ignore[misc]
        is_fast = False

    slow = Slow(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<eos>")
    for template in (CHATML, TAGGED):
        slow.chat_template = template
        with pytest.raises(DataError, match="DATA_SLOW_TOKENIZER"):
            check_tokenizer(slow, format_="messages", loss_on="assistant")
        check_tokenizer(slow, format_="messages", loss_on="all")
        with pytest.raises(DataError, match="DATA_SLOW_TOKENIZER"):
            run(slow, "all", {"messages": [*CHAT[:1], {**CHAT[1], "weight": 0}, *CHAT[2:]]})


# Messages that are not to be learned

LEFT_OUT = [{"weight": 0}, {"train": False}, {"training": False}, {"masked": True}, {"weight": 0, "train": False}]


@pytest.mark.parametrize("template", [CHATML, TAGGED, THINKING, CHATML_TEMPLATE])
@pytest.mark.parametrize("mark", LEFT_OUT, ids=str)
def test_a_message_that_is_not_to_be_learned_is_not(tokenizer: Any, template: str, mark: dict[str, Any]) -> None:
    tokenizer.chat_template = template
    plain = run(tokenizer, "assistant", {"messages": CHAT})[0]
    marked = run(tokenizer, "assistant", {"messages": [*CHAT[:1], {**CHAT[1], **mark}, *CHAT[2:]]})[0]
    assert marked[0] == plain[0]
    assert "mutable sequence" in counted(tokenizer, plain)
    assert counted(tokenizer, marked) == re.split(r"sequence\.(?:<.im_end.>)?<eos>\n?", counted(tokenizer, plain))[1]
    last = run(tokenizer, "assistant", {"messages": [*CHAT[:3], {**CHAT[3], **mark}]})[0]
    assert "immutable" not in counted(tokenizer, last)
    assert counted(tokenizer, plain).startswith(counted(tokenizer, last))


def test_a_message_that_is_not_to_be_learned_where_all_others_are(tokenizer: Any) -> None:
    tokenizer.chat_template = CHATML
    for index, lost in ((0, "<|user|>What is a list?<eos>\n"), (1, "<|assistant|>A mutable sequence.<eos>\n")):
        messages = [{**message, "weight": int(at != index)} for at, message in enumerate(CHAT)]
        document = run(tokenizer, "all", {"messages": messages})[0]
        whole = tokenizer.decode(document[0])
        if index:  # where the assistant speaks begins what it says
            lost = lost.removeprefix("<|assistant|>")
        assert counted(tokenizer, document) == whole.replace(lost, "")


@pytest.mark.parametrize("mark", [{"weight": 1}, {"train": True}, {"masked": False}, {"weight": 1.0}, {"weight": None}])
def test_a_message_that_is_to_be_learned_is_as_any(tokenizer: Any, mark: dict[str, Any]) -> None:
    tokenizer.chat_template = CHATML
    marked = {"messages": [CHAT[0], {**CHAT[1], **mark}, *CHAT[2:]]}
    assert run(tokenizer, "assistant", marked) == run(tokenizer, "assistant", {"messages": CHAT})


@pytest.mark.parametrize(
    ("at", "mark", "says"),
    [
        (1, {"weight": 0.5}, "messages[1].weight is 0.5, neither 0 nor 1"),
        (1, {"weight": True}, "messages[1].weight is True, neither 0 nor 1"),
        (1, {"train": 0}, "messages[1].train is 0, neither false nor true"),
        (1, {"train": "false"}, "messages[1].train is 'false'"),
        (1, {"weight": 1, "train": False}, "both to be trained on and not to be"),
        (0, {"train": True}, "messages[0].train=true asks to train on the messages of user"),
    ],
)
def test_marks_that_say_nothing_clear(tokenizer: Any, at: int, mark: dict[str, Any], says: str) -> None:
    tokenizer.chat_template = CHATML
    with pytest.raises(DataError) as caught:
        run(tokenizer, "assistant", {"messages": [{**m, **mark} if i == at else m for i, m in enumerate(CHAT)]})
    assert caught.value.codes == ("DATA_TYPE",)
    assert str(caught.value).startswith("record 1 of the data: messages[")
    assert says in str(caught.value)


def test_a_user_is_learned_where_all_are(tokenizer: Any) -> None:
    tokenizer.chat_template = CHATML
    messages = [{**CHAT[0], "train": True}, *CHAT[1:]]
    assert run(tokenizer, "all", {"messages": messages}) == run(tokenizer, "all", {"messages": CHAT})


# What a template leaves out


@pytest.mark.parametrize("loss_on", ["all", "assistant"])
def test_calls_that_the_template_shows_are_learned(tokenizer: Any, loss_on: str) -> None:
    tokenizer.chat_template = TOOLS
    document = run(tokenizer, loss_on, {"messages": CALLING, "tools": [{"name": "weather", "default": None}]})[0]
    shown = tokenizer.decode(document[0])
    # Nulls inside a call are keys that another record has, for all that a table tells.
    assert '<|tools|>[{"name": "weather"}]' in shown
    assert '<call>{"name": "weather", "arguments": {"city": "Bern"}}<eos>' in shown
    assert '<call>{"name": "weather"' in counted(tokenizer, document)
    as_text = run(tokenizer, loss_on, {"messages": CALLING, "tools": '[{"name": "weather"}]'})[0]
    assert as_text == document


THOUGHT = {"role": "assistant", "content": "Yes.", "reasoning_content": "Let me see."}


@pytest.mark.parametrize(
    ("template", "messages", "tools", "part"),
    [
        (CHATML_TEMPLATE, CALLING, None, "messages[1].tool_calls"),
        (CHATML_TEMPLATE, [CHAT[0], {**CHAT[1], "function_call": {"name": "f"}}], None, "messages[1].function_call"),
        (CHATML_TEMPLATE, CHAT, [{"name": "f"}], "tools"),
        (CHATML_TEMPLATE, [CHAT[0], THOUGHT], None, "messages[1].reasoning_content"),
        (TOOLS, [{**CHAT[0], "name": "Ada"}, *CHAT[1:]], None, "messages[0].name"),
        ("{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}",
         [{"role": "system", "content": "Be kind."}, *CHAT], None, "messages[0].content"),
    ],
)  # fmt: skip
def test_what_a_template_leaves_out_is_refused(
    tokenizer: Any, template: str, messages: Any, tools: Any, part: str
) -> None:
    tokenizer.chat_template = template
    with pytest.raises(DataError) as caught:
        run(tokenizer, "all", {"messages": CHAT[:2], "tools": None}, {"messages": messages, "tools": tools})
    (problem,) = caught.value.problems
    assert problem.code == "DATA_CHAT_DROPPED"
    assert f"record 2 of the data: the chat template leaves out {part}," in problem.message


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_thoughts_are_shown_by_whichever_name_they_have(tokenizer: Any, name: str) -> None:
    tokenizer.chat_template = TOOLS
    thought = {"role": "assistant", "content": "Yes.", name: "Let me see."}
    assert "<think>Let me see.</think>Yes." in tokenizer.decode(
        run(tokenizer, "all", {"messages": [CHAT[0], thought]})[0][0]
    )


def test_tools_that_are_none(tokenizer: Any) -> None:
    tokenizer.chat_template = TOOLS
    for tools in ("{", "7", [3]):
        with pytest.raises(DataError, match="DATA_TYPE"):
            run(tokenizer, "all", {"messages": CHAT, "tools": tools})
    for tools in ("", [], None):
        assert run(tokenizer, "all", {"messages": CHAT, "tools": tools}) == run(tokenizer, "all", {"messages": CHAT})


@pytest.mark.parametrize("template", [CHATML, TAGGED])
def test_the_last_answer_alone(tokenizer: Any, template: str) -> None:
    tokenizer.chat_template = template
    chats = [CHAT, [*CHAT, {"role": "user", "content": "Thanks"}], [*CHAT[:3], {**CHAT[3], "weight": 0}]]
    found = [counted(tokenizer, run(tokenizer, "last_assistant", {"messages": chat})[0]) for chat in chats]
    assert found == ["An immutable one.<eos>\n", "An immutable one.<eos>\n", "A mutable sequence.<eos>\n"]
    asked = [CHAT[0], {**CHAT[1], "train": True}, *CHAT[2:]]
    with pytest.raises(DataError, match=r"messages\[1\].train=true asks to train on a message that is not the last"):
        run(tokenizer, "last_assistant", {"messages": asked})


@pytest.mark.parametrize("template", [CHATML, TAGGED])
def test_the_roles_that_are_listed(tokenizer: Any, template: str) -> None:
    tokenizer.chat_template = template
    chat = [{"role": "system", "content": "Be brief."}, *CHAT[:2], {**CHAT[2], "weight": 0}, CHAT[3]]
    said = counted(tokenizer, run(tokenizer, ("user", "assistant"), {"messages": chat})[0])
    assert said == "<|user|>What is a list?<eos>\nA mutable sequence.<eos>\nAn immutable one.<eos>\n"
    assert run(tokenizer, ("assistant",), {"messages": chat}) == run(tokenizer, "assistant", {"messages": chat})
    (document,) = run(tokenizer, ("tool",), {"messages": chat})
    assert counted(tokenizer, document) == ""


def test_a_system_prompt_where_there_is_none(tokenizer: Any) -> None:
    tokenizer.chat_template = CHATML
    own = [{"role": "system", "content": "Mine."}, *CHAT]
    given, kept = run(tokenizer, "assistant", {"messages": CHAT}, {"messages": own}, system_prompt="Be\nbrief.")
    assert tokenizer.decode(given[0]).startswith("<|system|>Be\nbrief.<eos>\n<|user|>What is a list?")
    assert tokenizer.decode(kept[0]).startswith("<|system|>Mine.<eos>\n<|user|>")
    assert counted(tokenizer, given) == counted(tokenizer, kept) == "A mutable sequence.<eos>\nAn immutable one.<eos>\n"
    tokenizer.chat_template = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
    with pytest.raises(DataError, match=r"leaves out messages\[0\].content"):
        run(tokenizer, "all", {"messages": CHAT}, system_prompt="Be brief.")
