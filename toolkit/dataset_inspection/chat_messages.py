"""The fields of chat messages other than role and content: which messages are trained on, and what a template renders.

No field of a message is ignored silently. A conversation is refused if the template leaves out a part that it needs; unknown
fields are reported once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from toolkit.config.job import LossOn
from toolkit.dataset_inspection.image_messages import texts_of
from toolkit.errors import Problem
from toolkit.io import parse_json

Messages = list[dict[str, Any]]
Render = Callable[[Messages, Any], str]

# Keys that leave a message out of the loss, with the values for trained and not trained on. OpenAI's `weight`, `train` and
# `training` of ShareGPT as Axolotl reads it, `masked` of earlier tools.
_LEARNED: dict[str, tuple[Any, Any]] = {
    "weight": (1, 0),
    "train": (True, False),
    "training": (True, False),
    "masked": (False, True),
}
# Keys that include an otherwise excluded message in the loss; weight 1 is not one, as OpenAI's files set it anywhere.
_ASKING = ("train", "training")
# Names for the reasoning of a message: chat templates read one of them (transformers 5.24
# utils/chat_template_utils.py _alias_reasoning_fields; earlier releases alias nothing).
_REASONING = ("reasoning_content", "thinking", "reasoning")
# Fields that carry text in addition to the content.
_SAID = ("tool_calls", "function_call", "refusal", "audio", "name", *_REASONING)
# Fields that each message has, by our names and by those of ShareGPT.
_WRITTEN = ("role", "content", "from", "value")
# The call that a tool's answer belongs to: the order shows it too, and most templates leave these out.
_OF_A_TOOL = ("name", "tool_call_id")
_MARK = "\N{SECTION SIGN}"


def learned_roles(loss_on: LossOn) -> frozenset[str] | None:
    """Return the roles whose messages count in the loss; None if all text counts."""
    if isinstance(loss_on, tuple):
        return frozenset(loss_on)
    return frozenset({"assistant"}) if loss_on in ("assistant", "last_assistant") else None


def learned_messages(messages: Sequence[Mapping[str, Any]], loss_on: LossOn) -> list[int]:
    """Return the indices of the messages in the loss; `last_assistant` is the last one that its own keys do not exclude."""
    roles = learned_roles(loss_on)
    found = [
        at
        for at, message in enumerate(messages)
        if (roles is None or message["role"] in roles) and not is_left_out(message)
    ]
    return found[-1:] if loss_on == "last_assistant" else found


def with_system_prompt(messages: Messages, prompt: str | None) -> Messages:
    """Return messages that begin with a system prompt, if they have no system message of their own."""
    if prompt is None or any(message["role"] in ("system", "developer") for message in messages):
        return messages
    return [{"role": "system", "content": prompt}, *messages]


def learning_fault(
    messages: Sequence[Mapping[str, Any]], loss_on: LossOn = "all", *, at: str = "messages"
) -> str | None:
    """Return what is wrong with the keys that exclude messages from the loss; None if nothing is.

    Args:
        messages: Messages with a valid role and content.
        loss_on: Value of `data.loss_on`.
        at: Name of their column.
    """
    roles = learned_roles(loss_on)
    for index, message in enumerate(messages):
        said = {key: message[key] for key in _LEARNED if message.get(key) is not None}
        for key, value in said.items():
            yes, no = _LEARNED[key]
            if value not in (yes, no) or isinstance(value, bool) != isinstance(yes, bool):
                allowed = [str(each).lower() for each in (no, yes)]
                return (
                    f"{at}[{index}].{key} is {value!r}, neither {allowed[0]} nor {allowed[1]}: whether a message is "
                    "trained on is true or false"
                )
        if len({value == _LEARNED[key][0] for key, value in said.items()}) > 1:
            shown = [f"{key}={value}" for key, value in said.items()]
            return f"{at}[{index}] is marked both to be trained on and not to be: {', '.join(shown)}"
        asked = [key for key in _ASKING if said.get(key) is True]
        if asked and roles is not None and message["role"] not in roles:
            only = "the assistant's" if roles == {"assistant"} else f"those of {', '.join(sorted(roles))}"
            return (
                f"{at}[{index}].{asked[0]}=true asks to train on the messages of {message['role']}, and "
                f"data.loss_on={loss_on if isinstance(loss_on, str) else ', '.join(loss_on)} trains on {only} alone"
            )
        if asked and loss_on == "last_assistant" and index not in learned_messages(messages, loss_on):
            return (
                f"{at}[{index}].{asked[0]}=true asks to train on a message that is not the last of the assistant, and "
                "data.loss_on=last_assistant trains on that alone"
            )
    return None


def asks_to_learn(message: Mapping[str, Any]) -> bool | None:
    """Return whether a message's own keys include it in the loss; None if it has no such key."""
    if is_left_out(message):
        return False
    return True if any(message.get(key) is True for key in _ASKING) else None


def said_besides(message: Mapping[str, Any]) -> str | None:
    """Return the first key of a message that carries text in addition to its content; None if there is none."""
    return next((key for key in _SAID if message.get(key)), None)


def is_left_out(message: Mapping[str, Any]) -> bool:
    """Return whether one of a message's own keys excludes it from the loss."""
    return any(message.get(key) is not None and message[key] == no for key, (_, no) in _LEARNED.items())


def for_template(messages: Iterable[Mapping[str, Any]]) -> Messages:
    """Return messages in the form for templates: without nulls and loss keys, with the reasoning under each of its names.

    Nulls inside tool calls are removed as well: Arrow adds them for keys that only other records have.
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
    """Return the tool descriptions of a record, which may be a list or its JSON text; None without any.

    Raises:
        ValueError: If they are neither.
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
    """Count the message keys that nothing reads: unknown ones, and those that assign a tool's answer to its call.

    Args:
        messages: Messages as in the file.
        template: Text of the chat template, which reads the keys that it mentions; None if it is not available.
    """
    known = {*_WRITTEN, *_LEARNED, *_SAID, *_OF_A_TOOL}
    found: Counter[str] = Counter()
    for message in (message for message in messages if isinstance(message, Mapping)):
        # Among known keys, a template may leave out only those of a tool's answer.
        optional = _OF_A_TOOL if template is not None and message.get("role") == "tool" else ()
        keys = [key for key, value in message.items() if value is not None and (key not in known or key in optional)]
        found.update(key for key in keys if not re.search(rf"\b{re.escape(str(key))}\b", template or ""))
    return found


def dropped(messages: Messages, tools: Any, whole: str, render: Render) -> str | None:
    """Return the first part of a conversation that a template leaves out; None if it renders all.

    Each part is removed in turn: if the rendering stays the same, the part was not rendered.

    Args:
        messages: Messages from `for_template`.
        tools: Tool descriptions from `tools_of`.
        whole: Rendered conversation.
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
        if any(text.strip() and text.strip() not in whole for text in texts_of(content)):
            # The content may be rendered escaped, as in JSON: then changing it changes the rendering.
            changed = {**message, "content": _changed(content)}
            if _renders(render, [*messages[:index], changed, *messages[index + 1 :]], tools) == whole:
                return f"messages[{index}].content"
    return None


def _changed(content: Any) -> Any:
    """Return a message's content with another text."""
    if isinstance(content, str):
        return content + _MARK
    return [{**item, "text": item["text"] + _MARK} if item["type"] == "text" else item for item in content]


def _renders(render: Render, messages: Messages, tools: Any) -> str | None:
    """Render messages that may be an incomplete conversation; None if the template refuses them."""
    try:
        return render(messages, tools)
    except MemoryError:
        raise
    except Exception:  # a template is a program: without a required part it may fail in any way
        return None


def dropped_problem(part: str, *, where: str, key: str) -> Problem:
    """Return the problem DATA_CHAT_DROPPED: a template leaves out a part of a conversation.

    Args:
        part: Part as returned by `dropped`.
        where: File or `data`, with the record.
        key: Key path that the problem names.
    """
    leaf = part.rpartition(".")[2]
    return Problem(
        code="DATA_CHAT_DROPPED",
        key=key,
        message=f"{where}: the chat template leaves out {part}, so the model would be trained without it",
        fix=f"Set data.chat_template or model.tokenizer to a template that shows {leaf}, such as that of the model's "
        f"instruct version, or remove {leaf} from the record",
    )
