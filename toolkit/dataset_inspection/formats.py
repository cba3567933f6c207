"""The formats of documents: the columns of each, and the checks of its records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

from toolkit.config.job import Data, EvalSource, LossOn
from toolkit.dataset_inspection.image_messages import content_fault
from toolkit.errors import Problem

Format = Literal["text", "prompt_completion", "messages", "tokens", "text_label", "tokens_tags"]
FORMAT_COLUMNS: dict[Format, tuple[str, ...]] = {
    "text": ("text",),
    "prompt_completion": ("prompt", "completion"),
    "messages": ("messages",),
    "tokens": ("input_ids",),
    "text_label": ("text", "label"),
    "tokens_tags": ("tokens", "tags"),
}
# Those of classifiers, which a source has only if its job's task asks for it: others read the same columns.
LABEL_FORMATS: tuple[Format, ...] = ("text_label", "tokens_tags")
# A message that calls a tool may have no content.
_CALLS = ("tool_calls", "function_call")
LOSS_ON_FORMAT: dict[LossOn, Format] = {
    "completion": "prompt_completion",
    "assistant": "messages",
    "last_assistant": "messages",
}
# Label of a token that does not count in the loss, as everywhere in transformers.
_NOT_LEARNED = -100


def as_format(name: str) -> Format:
    """Narrow a string to the type `Format`."""
    return next(format_ for format_ in get_args(Format) if format_ == name)


def record_fault(record: Mapping[str, Any], format_: Format) -> str | None:
    """Return why a record is not a valid document of this format; None if it is."""
    if format_ == "messages":
        return _messages_fault(record.get("messages"))
    if format_ == "tokens":
        return _tokens_fault(record)
    if format_ == "text_label":
        return _labelled_fault(record)
    if format_ == "tokens_tags":
        return _tagged_fault(record)
    for column in FORMAT_COLUMNS[format_]:
        if not isinstance(value := record.get(column), str):
            return f"{column} is {kind_of(value)}, not a string"
    return None


def has_settings(key: str) -> bool:
    """Return whether the source with this key path is a section of its own."""
    return key.startswith(("data.sources", "data.eval."))


def setting_of(key: str, name: str) -> str:
    """Return the key of a setting of a source: its own where it is a section, else that of `data`."""
    if not has_settings(key) and name == "split" and key.startswith("data.eval"):
        return "data.eval_split"
    return f"{key}.{name}" if has_settings(key) else f"data.{name}"


def split_of(source: EvalSource, key: str) -> str:
    """Return the split of a source with this key path."""
    return source.split or ("validation" if key.startswith("data.eval") else "train")


def section_problems(data: Data) -> list[Problem]:
    """Return the problem DATA_SOURCES if the section names its training data twice or not at all."""
    if data.sources is None:
        if data.train is not None:
            return []
        fix = "Add data.train: FILE, with a .jsonl, .txt, .csv or .parquet file or a hub id, or a list as data.sources"
        return [Problem(code="DATA_SOURCES", key="data", message="data names no training data", fix=fix)]
    problems = []
    own = ("max_samples", "split") + (("format", "name", "revision") if data.eval is None or data.eval_sets else ())
    for name in ("train", *own):
        if name not in data.model_fields_set or getattr(data, name) is None:
            continue
        instead = {"train": "path", "max_samples": "max_rows"}.get(name, name)
        message = f"data.{name}={getattr(data, name)} beside data.sources: each source has its own {instead}"
        fix = f"Remove data.{name}, and set {instead} of the source"
        problems.append(Problem(code="DATA_SOURCES", key=f"data.{name}", message=message, fix=fix))
    return problems


def image_data_problems(data: Data) -> list[Problem]:
    """Return the problems DATA_IMAGES of a data section whose documents have images."""
    problems = []
    if "packing" in data.model_fields_set and data.packing != "none":
        message = f"packing={data.packing} with task=image-text-to-text: documents with images are not joined"
        fix = "Set data.packing to none, or leave it out"
        problems.append(Problem(code="DATA_IMAGES", key="data.packing", message=message, fix=fix))
    if data.long_rows == "split":
        message = (
            "long_rows=split with task=image-text-to-text: a part of a document would lack the images of the others"
        )
        fix = "Set data.long_rows to truncate, refuse or drop"
        problems.append(Problem(code="DATA_IMAGES", key="data.long_rows", message=message, fix=fix))
    if data.streaming:
        message = "streaming=true with task=image-text-to-text: the tokens of images are counted before training"
        problems.append(
            Problem(code="DATA_IMAGES", key="data.streaming", message=message, fix="Set data.streaming to false")
        )
    if data.preprocess is not None:
        message = "preprocess with task=image-text-to-text: what it returns is kept as JSON, which has no images"
        problems.append(
            Problem(code="DATA_IMAGES", key="data.preprocess", message=message, fix="Remove data.preprocess")
        )
    return problems


def formats_without_images(formats: Iterable[Format]) -> list[Problem]:
    """Return the problem DATA_IMAGES of documents of a model that reads images, if some are no messages."""
    listed = ", ".join(dict.fromkeys(format_ for format_ in formats if format_ != "messages"))
    if not listed:
        return []
    message = f"format={listed} with task=image-text-to-text: images are parts of messages"
    fix = (
        'Write each document as messages, such as {"messages": [{"role": "user", "content": [{"type": "image", "path": '
        '"cat.png"}, {"type": "text", "text": "What is it?"}]}, ...]}'
    )
    return [Problem(code="DATA_IMAGES", key="data.format", message=message, fix=fix)]


def loss_on_problem(loss_on: LossOn, format_: Format, *, key: str = "data.loss_on") -> Problem | None:
    """Return the problem DATA_LOSS_ON if the format has no tokens of the kind that `data.loss_on` names."""
    needed = "messages" if isinstance(loss_on, tuple) else LOSS_ON_FORMAT.get(loss_on, format_)
    if needed == format_:
        return None
    allowed = "all" + "".join(f" or {name}" for name, of in LOSS_ON_FORMAT.items() if of == format_)
    said = loss_on if isinstance(loss_on, str) else ", ".join(loss_on)
    message = f"{key}={said} needs the format {needed}, but the data is {format_}"
    return Problem(code="DATA_LOSS_ON", key=key, message=message, fix=f"Set {key} to {allowed}")


def _tokens_fault(record: Mapping[str, Any]) -> str | None:
    ids = record.get("input_ids")
    if not isinstance(ids, list) or not all(isinstance(each, int) and not isinstance(each, bool) for each in ids):
        return (
            f"input_ids is {kind_of(ids)}, not a list of whole numbers"
            if not isinstance(ids, list)
            else ("input_ids has an item that is not a whole number")
        )
    if any(not 0 <= each < 2**31 for each in ids):
        return "input_ids has a number that is no token id"
    for column, allowed in (("labels", None), ("attention_mask", (0, 1))):
        values = record.get(column)
        if values is None:
            continue
        if not isinstance(values, list) or len(values) != len(ids):
            return f"{column} is not a list of as many numbers as input_ids"
        for at, (value, token) in enumerate(zip(values, ids, strict=True)):
            if value not in (allowed or (_NOT_LEARNED, token)):
                rule = "0 nor 1" if allowed else f"{_NOT_LEARNED} nor input_ids[{at}]={token}: labels are not shifted"
                return f"{column}[{at}] is {value!r}, neither {rule}"
    return None


def _labelled_fault(record: Mapping[str, Any]) -> str | None:
    for column in ("text", "text_pair"):
        value = record.get(column)
        if not isinstance(value, str) and not (column == "text_pair" and value is None):
            return f"{column} is {kind_of(value)}, not a string"
    return "label is absent or null" if record.get("label") is None else None


def _tagged_fault(record: Mapping[str, Any]) -> str | None:
    words, tags = record.get("tokens"), record.get("tags")
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        return (
            f"tokens is {kind_of(words)}, not a list of strings"
            if not isinstance(words, list)
            else "tokens has an item that is not a string"
        )
    if not isinstance(tags, list):
        return f"tags is {kind_of(tags)}, not a list of as many tags as tokens"
    if len(words) != len(tags):
        return f"there are {len(words)} tokens and {len(tags)} tags"
    return "a tag is null" if None in tags else None


def _messages_fault(messages: Any) -> str | None:
    if not isinstance(messages, list):
        return f"messages is {kind_of(messages)}, not a list of {{role, content}}"
    if not messages:
        return "messages is an empty list"
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            return f"messages[{index}] is {kind_of(message)}, not an object with role and content"
        if not isinstance(message.get("role"), str):
            return f"messages[{index}].role is {kind_of(message.get('role'))}, not a string"
        content = message.get("content")
        if isinstance(content, list):
            if (fault := content_fault(content, at=f"messages[{index}]")) is not None:
                return fault
        elif not isinstance(content, str) and not (content is None and any(map(message.get, _CALLS))):
            return f"messages[{index}].content is {kind_of(content)}, not a string"
    return None


def kind_of(value: Any, *, null: str = "absent or null") -> str:
    """Return the type of a JSON value in words; `null` is the text for None."""
    if value is None:
        return null
    names = {
        bool: "true or false",
        int: "a number",
        float: "a number",
        list: "a list",
        dict: "an object",
        str: "a string",
    }
    return names.get(type(value), f"a {type(value).__name__}")
