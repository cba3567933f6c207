"""What the messages of a conversation hold besides role and content: what is learned of them, and what a template shows.

Nothing that a message holds is passed over in silence. What a template must show to tell the conversation is refused where
it does not; what nothing is known of is named once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from toolkit.errors import Problem
from toolkit.io import parse_json

Messages = list[dict[str, Any]]
Render = Callable[[Messages, Any], str]

# Keys by which files leave a message out of the loss, and the values of each: learned, not learned. OpenAI's `weight`,
# `train` and `training` of ShareGPT as Axolotl reads it, `masked` of earlier tools.
_LEARNED: dict[str, tuple[Any, Any]] = {
    "weight": (1, 0),
    "train": (True, False),
    "training": (True, False),
    "masked": (False, True),
}
# Those by which a message that would not be learned asks to be: weight 1 is what OpenAI's files say of any.
_ASKING = ("train", "training")
# Names under which a message's thoughts are passed: chat templates read one of them (transformers 5.24
# utils/chat_template_utils.py _alias_reasoning_fields; earlier releases alias nothing).
_REASONING = ("reasoning_content", "thinking", "reasoning")
# What a message says besides its content.
_SAID = ("tool_calls", "function_call", "refusal", "audio", "name", *_REASONING)
# What each message has, by our names and by those of ShareGPT.
_WRITTEN = ("role", "content", "from", "value")
# Which call a tool's answer belongs to: order says it too, and most templates leave these out.
_OF_A_TOOL = ("name", "tool_call_id")
_MARK = "\N{SECTION SIGN}"


def learning_fault(messages: Sequence[Mapping[str, Any]], loss_on: str = "all", *, at: str = "messages") -> str | None:
    """Return what is wrong with the keys that take messages out of the loss; None when nothing is.

    Args:
        messages: Whose role and content are sound.
        loss_on: `data.loss_on`.
        at: Name of their column.
    """
    for index, message in enumerate(messages):
        said = {key: message[key] for key in _LEARNED if message.get(key) is not None}
        for key, value in said.items():
            yes, no = _LEARNED[key]
            if value not in (yes, no) or isinstance(value, bool) != isinstance(yes, bool):
                shown = [str(allowed).lower() for allowed in (no, yes)]
                return (
                    f"{at}[{index}].{key} is {value!r}, neither {shown[0]} nor {shown[1]}: a message is learned or not"
                )
        if len({value == _LEARNED[key][0] for key, value in said.items()}) > 1:
            return f"{at}[{index}] is learned and not learned at once: {', '.join(f'{k}={v}' for k, v in said.items())}"
        asked = [key for key in _ASKING if said.get(key) is True]
        if asked and loss_on == "assistant" and message["role"] != "assistant":
            return (
                f"{at}[{index}].{asked[0]}=true asks to learn what {message['role']} says, and data.loss_on=assistant "
                "learns what the assistant says alone"
            )
    return None


def asks_to_learn(message: Mapping[str, Any]) -> bool | None:
    """Return whether a message is to be learned, by one of its own keys; None where it does not say."""
    if is_left_out(message):
        return False
    return True if any(message.get(key) is True for key in _ASKING) else None


def said_besides(message: Mapping[str, Any]) -> str | None:
    """Name the first key by which a message says more than its content."""
    return next((key for key in _SAID if message.get(key)), None)


def is_left_out(message: Mapping[str, Any]) -> bool:
    """Return whether a message is not to be learned, by one of its own keys."""
    return any(message.get(key) is not None and message[key] == no for key, (_, no) in _LEARNED.items())


def for_template(messages: Iterable[Mapping[str, Any]]) -> Messages:
    """Return messages as a template takes them: without nulls and keys of the loss, thoughts under each name.

    Nulls inside tool calls are left out as well: Arrow fills them in where another record has a key.
    """
    shown = []
    for message in messages:
        kept = {key: value for key, value in message.items() if value is not None and key not in _LEARNED}
        for key in ("tool_calls", "function_call"):
            if key in kept:
                kept[key] = _without_nulls(kept[key])
        thoughts = next((kept[key] for key in _REASONING if kept.get(key)), None)
        shown.append(kept if thoughts is None else {**dict.fromkeys(_REASONING[:2], thoughts), **kept})
    return shown


def tools_of(record: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the descriptions of tools that a record offers, which may be a list or its JSON text; None without any.

    Raises:
        ValueError: It is neither.
    """
    tools = record.get("tools")
    if isinstance(tools, str) and tools.strip():
        tools = parse_json(tools)
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError("tools is neither a list of objects nor the JSON of one")
    return [_without_nulls(tool) for tool in tools]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def unread_keys(messages: Iterable[Any], *, template: str | None = None) -> Counter[str]:
    """Count keys of messages that nothing reads: unknown ones, and which call a tool's answer belongs to.

    Args:
        messages: As the file has them.
        template: Text of the chat template, which reads what it mentions; None where it is not at hand.
    """
    known = {*_WRITTEN, *_LEARNED, *_SAID, *_OF_A_TOOL}
    found: Counter[str] = Counter()
    for message in (message for message in messages if isinstance(message, Mapping)):
        # Of the keys that are known, those of a tool's answer are the ones that a template may well leave out.
        optional = _OF_A_TOOL if template is not None and message.get("role") == "tool" else ()
        keys = [key for key, value in message.items() if value is not None and (key not in known or key in optional)]
        found.update(key for key in keys if not re.search(rf"\b{re.escape(str(key))}\b", template or ""))
    return found


def dropped(messages: Messages, tools: Any, whole: str, render: Render) -> str | None:
    """Name the first part of a conversation that a template leaves out; None when it shows all.

    Each part is taken out in turn: what then renders the same was not shown.

    Args:
        messages: As `for_template` gives them.
        tools: As `tools_of` gives them.
        whole: The conversation as it is rendered.
        render: Renders messages and tools.
    """
    if tools and _renders(render, messages, None) == whole:
        return "tools"
    for index, message in enumerate(messages):
        for key in _SAID:
            if not message.get(key) or (message["role"] == "tool" and key in _OF_A_TOOL):
                continue
            gone = _REASONING if key in _REASONING else (key,)
            rest = {name: value for name, value in message.items() if name not in gone}
            if _renders(render, [*messages[:index], rest, *messages[index + 1 :]], tools) == whole:
                return f"messages[{index}].{key}"
        content = message.get("content")
        if content and content.strip() and content.strip() not in whole:
            # It may be shown in other letters, as JSON: then another content is shown as another one.
            changed = {**message, "content": content + _MARK}
            if _renders(render, [*messages[:index], changed, *messages[index + 1 :]], tools) == whole:
                return f"messages[{index}].content"
    return None


def _renders(render: Render, messages: Messages, tools: Any) -> str | None:
    """Render what need not be a whole conversation; None where the template refuses it."""
    try:
        return render(messages, tools)
    except Exception:  # a template is a program: without a part that it needs it may fail in any way
        return None


def dropped_problem(part: str, *, where: str, key: str) -> Problem:
    """Return DATA_CHAT_DROPPED: a template leaves out a part of a conversation.

    Args:
        part: As `dropped` names it.
        where: File or data, and record.
        key: Key path that the problem names.
    """
    leaf = part.rpartition(".")[2]
    return Problem(
        code="DATA_CHAT_DROPPED",
        key=key,
        message=f"{where}: the chat template leaves out {part}, so that the conversation would be learned without it",
        fix=f"Set data.chat_template or model.tokenizer to a template that shows {leaf}, such as that of the model's "
        f"instruct version, or remove {leaf} from the record",
    )
