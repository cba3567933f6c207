"""Layouts of documents in the columns of a source: our own columns, or those of Alpaca or ShareGPT.

Sources: the Alpaca prompt is that of github.com/tatsu-lab/stanford_alpaca (README; the `text` column of tatsu-lab/alpaca
is prompt and completion); ShareGPT's `conversations` of {from, value} as FastChat and LLaMA-Factory read them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.dataset_inspection.chat_messages import asks_to_learn, learning_fault, said_besides
from toolkit.dataset_inspection.formats import FORMAT_COLUMNS, LABEL_FORMATS, Format, kind_of, record_fault

Record = Mapping[str, Any]

_ALPACA = (
    "Below is an instruction that describes a task{paired}. Write a response that appropriately completes the request."
)
_PAIRED = ", paired with an input that provides further context"

# ShareGPT's names of speakers, and the roles that chat templates know.
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}

# Columns that would change a document if they were read: leaving them out is a mistake. All others (ids, sources, scores,
# urls) are not training data.
_CONTEXT = ("input", "context", "passage", "documents", "system", "system_prompt", "history", "tools")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One layout of the documents of a format in columns.

    Args:
        name: Common name of the layout.
        format: Format of the documents.
        needed: Columns that it requires.
        optional: Further columns that it reads.
        fault: Returns why a record is not a document; None if it is.
        convert: Converts a record to our own columns; None if it has them already.
    """

    name: str
    format: Format
    needed: tuple[str, ...]
    optional: tuple[str, ...] = ()
    fault: Callable[[Record], str | None]
    convert: Callable[[Record], dict[str, Any]] | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        """All columns that it reads if they are present."""
        return (*self.needed, *self.optional)


def fitting_layouts(columns: tuple[str, ...], wanted: str) -> list[Layout]:
    """Return the layouts that fit the columns, our own first, at most one per format.

    Alpaca's columns become prompts and completions, or messages if `wanted` is that format.
    """
    fitting: dict[Format, Layout] = {}
    for layout in LAYOUTS:
        if wanted != layout.format and (layout.format in LABEL_FORMATS or wanted in LABEL_FORMATS):
            continue
        if set(layout.needed) <= set(columns) and (layout is not ALPACA_CHAT or wanted == "messages"):
            fitting.setdefault(layout.format, layout)
    if len(fitting) > 1 and wanted != "tokens":  # tools leave their tokens beside the text
        fitting.pop("tokens", None)
    return list(fitting.values())


def unread_columns(layout: Layout, columns: tuple[str, ...]) -> tuple[str, ...]:
    """Return the columns with context of the documents that this layout does not read."""
    return tuple(column for column in columns if column.lower() in _CONTEXT and column not in layout.reads)


def _own_fault(format_: Format) -> Callable[[Record], str | None]:
    return lambda record: record_fault(record, format_)


def _alpaca_fault(record: Record) -> str | None:
    for column in ("instruction", "output"):
        if not isinstance(value := record.get(column), str):
            return f"{column} is {kind_of(value)}, not a string"
    given = record.get("input")
    return None if given is None or isinstance(given, str) else f"input is {kind_of(given)}, not a string"


def _alpaca_pair(record: Record) -> dict[str, Any]:
    given = (record.get("input") or "").strip()
    head = _ALPACA.format(paired=_PAIRED if given else "")
    middle = f"\n\n### Input:\n{record['input']}" if given else ""
    prompt = f"{head}\n\n### Instruction:\n{record['instruction']}{middle}\n\n### Response:\n"
    return {"prompt": prompt, "completion": record["output"]}


def _alpaca_chat(record: Record) -> dict[str, Any]:
    given = (record.get("input") or "").strip()
    asked = f"{record['instruction']}\n\n{record['input']}" if given else record["instruction"]
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": record["output"]}]}


def _sharegpt_fault(record: Record) -> str | None:
    turns = record.get("conversations")
    if not isinstance(turns, list):
        return f"conversations is {kind_of(turns)}, not a list of {{from, value}}"
    if not turns:
        return "conversations is an empty list"
    system = record.get("system")
    if system is not None and not isinstance(system, str):
        return f"system is {kind_of(system)}, not a string"
    for index, turn in enumerate(turns):
        at = f"conversations[{index}]"
        if not isinstance(turn, Mapping):
            return f"{at} is {kind_of(turn)}, not an object with from and value"
        speaker, said = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
        if not isinstance(speaker, str):
            return f"{at}.from is {kind_of(speaker)}, not a string"
        if speaker.lower() not in SHAREGPT_ROLES:
            return f"{at}.from is {speaker!r}, none of {', '.join(SHAREGPT_ROLES)}"
        if not isinstance(said, str):
            return f"{at}.value is {kind_of(said)}, not a string"
        if (besides := said_besides(turn)) is not None:
            return f"{at}.{besides} is not part of ShareGPT: give conversations with it as messages"
    return learning_fault(turns, at="conversations")


def _sharegpt_chat(record: Record) -> dict[str, Any]:
    messages = [
        {
            "role": SHAREGPT_ROLES[turn.get("from", turn.get("role")).lower()],
            "content": turn.get("value", turn.get("content")),
            # Set in each message, even without a value: records become one table.
            "train": asks_to_learn(turn),
        }
        for turn in record["conversations"]
    ]
    if (record.get("system") or "").strip():
        messages.insert(0, {"role": "system", "content": record["system"], "train": None})
    return {"messages": messages}


_OPTIONAL: dict[Format, tuple[str, ...]] = {
    "messages": ("tools",),
    "tokens": ("labels", "attention_mask"),
    "text_label": ("text_pair",),
}


def _own(format_: Format) -> Layout:
    return Layout(
        name=format_,
        format=format_,
        needed=FORMAT_COLUMNS[format_],
        optional=_OPTIONAL.get(format_, ()),
        fault=_own_fault(format_),
    )


ALPACA = Layout(
    name="alpaca",
    format="prompt_completion",
    needed=("instruction", "output"),
    optional=("input",),
    fault=_alpaca_fault,
    convert=_alpaca_pair,
)
ALPACA_CHAT = Layout(
    name="alpaca",
    format="messages",
    needed=ALPACA.needed,
    optional=ALPACA.optional,
    fault=_alpaca_fault,
    convert=_alpaca_chat,
)
SHAREGPT = Layout(
    name="sharegpt",
    format="messages",
    needed=("conversations",),
    optional=("system",),
    fault=_sharegpt_fault,
    convert=_sharegpt_chat,
)


def _named(format_: Format, **theirs: str) -> Layout:
    """Return the layout of a format whose columns have other names: ours, each with theirs."""

    def converted(record: Record) -> dict[str, Any]:
        return {ours: record.get(column) for ours, column in theirs.items()}

    return Layout(
        name=format_,
        format=format_,
        needed=tuple(theirs.values()),
        fault=lambda record: record_fault(converted(record), format_),
        convert=converted,
    )


# Columns of GLUE, SNLI and their like, of multi-label sets, and of CoNLL's.
LABELLED = (
    _named("text_label", text="sentence1", text_pair="sentence2", label="label"),
    _named("text_label", text="premise", text_pair="hypothesis", label="label"),
    _named("text_label", text="sentence", label="label"),
    _named("text_label", text="text", label="labels"),
    _named("tokens_tags", tokens="tokens", tags="ner_tags"),
    _named("tokens_tags", tokens="tokens", tags="labels"),
    _named("tokens_tags", tokens="words", tags="tags"),
)
LAYOUTS = (*(_own(format_) for format_ in FORMAT_COLUMNS), ALPACA, ALPACA_CHAT, SHAREGPT, *LABELLED)
