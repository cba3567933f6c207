"""Checks of conversations before they are loaded: what is trained on, and what their chat template leaves out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from toolkit.bounded import MEMORY_BYTES, OutOfBoundsError, call_bounded
from toolkit.config.job import LossOn
from toolkit.dataset_inspection.chat_messages import (
    dropped,
    dropped_problem,
    for_template,
    learning_fault,
    tools_of,
    unread_keys,
    with_system_prompt,
)
from toolkit.dataset_inspection.chat_template import (
    ChatTemplate,
    TemplateRefusalError,
    is_template_fault,
    refused_problem,
)
from toolkit.dataset_inspection.image_messages import IMAGE_COLUMNS, column_images, split_images, text_fault
from toolkit.dataset_inspection.layouts import Layout
from toolkit.errors import Problem, first_line
from toolkit.units import format_bytes

# Processor time in which one record is rendered as often as it has parts; a long one of 100 messages takes about a second.
RENDERING_SECONDS = 30

Records = Sequence[tuple[int, dict[str, Any]]]


def conversations(records: Records, layout: Layout) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the records that are valid conversations, in our own columns and those of images, with their line numbers."""
    for line, record in records:
        if layout.format == "messages" and layout.fault(record) is None:
            images = {name: record[name] for name in IMAGE_COLUMNS if name in record}
            yield line, record if layout.convert is None else {**layout.convert(record), **images}


def conversation_problems(
    records: Records,
    layout: Layout,
    loss_on: LossOn,
    template: ChatTemplate | None,
    *,
    key: str,
    name: str,
    system_prompt: str | None = None,
) -> list[Problem]:
    """Return the problems of training on whole conversations, as far as their files and their template show.

    Args:
        records: First records of a source.
        layout: Layout of its columns.
        loss_on: Value of `data.loss_on`.
        template: Chat template that renders them; None if it is in a tokenizer on the hub.
        key: Key path that problems name.
        name: Name of the source.
        system_prompt: Value of `data.system_prompt`.
    Returns:
        DATA_TYPE, DATA_IMAGE, DATA_CHAT_DROPPED or DATA_CHAT_TEMPLATE, each for the first record that has it.
    """
    found: dict[str, Problem] = {}
    shapes: set[str] = set()
    for line, record in conversations(records, layout):
        where = f"{name}, record at line {line}"
        reads_text = template is not None and not template.lists
        fault = text_fault(record["messages"]) if reads_text else None
        if (fault := fault or learning_fault(record["messages"], loss_on)) is not None:
            fix = "Correct it, or remove the key or the record"
            found.setdefault("fault", Problem(code="DATA_TYPE", key=key, message=f"{where}: {fault}", fix=fix))
            continue
        if template is not None and template.lists:
            try:
                split_images(record["messages"], column_images(record))
            except ValueError as error:
                fix = "Correct the places of its images, or remove the record"
                found.setdefault("places", Problem(code="DATA_IMAGE", key=key, message=f"{where}: {error}", fix=fix))
                continue
        record = {**record, "messages": with_system_prompt(record["messages"], system_prompt)}
        # What a template renders depends on the roles and keys: here one record of each kind is checked for the others,
        # and every record when it is tokenised.
        shape = repr([(message["role"], sorted(message)) for message in for_template(record["messages"])])
        if template is None or shape in shapes:
            continue
        shapes.add(shape)
        try:
            for problem in _bounded_problems(record, template, where=where, key=key):
                found.setdefault(problem.code, problem)
        except OutOfBoundsError:
            reason = f"it takes more than {RENDERING_SECONDS} s of processor time, or {format_bytes(MEMORY_BYTES)}"
            found["bounds"] = refused_problem(reason, where=where, key=key)
            break  # or each record would take as long
    return list(found.values())


def _bounded_problems(record: Mapping[str, Any], template: ChatTemplate, *, where: str, key: str) -> Sequence[Problem]:
    """Return the problems of rendering one record, in a process of limited time and memory: a template is a program."""
    return call_bounded(
        lambda: list(_rendering_problems(record, template, where=where, key=key)), seconds=RENDERING_SECONDS
    )


def _rendering_problems(
    record: Mapping[str, Any], template: ChatTemplate, *, where: str, key: str
) -> Iterator[Problem]:
    messages = for_template(record["messages"])
    try:
        tools = tools_of(record)
    except ValueError as error:
        yield Problem(code="DATA_TYPE", key=key, message=f"{where}: {error}", fix="Write tools as a list of objects")
        return
    try:
        part = dropped(messages, tools, template.render(messages, tools), template.render)
    except TemplateRefusalError as error:
        yield refused_problem(str(error), where=where, key=key)
    except MemoryError:
        raise
    except Exception as error:
        if is_template_fault(error):  # other errors are left to the rendering by transformers
            yield refused_problem(first_line(error), where=where, key=key)
    else:
        if part is not None:
            yield dropped_problem(part, where=where, key=key)


def unread_key_warning(name: str, conversations_: Sequence[Any], *, template: str | None) -> str | None:
    """Return a warning of the message keys of a source that nothing reads, with their counts; None without any.

    Args:
        name: Name of the source.
        conversations_: Lists of messages, as in the file.
        template: Text of their chat template, if available.
    """
    found: Counter[str] = Counter()
    for messages in conversations_:
        found += unread_keys(messages if isinstance(messages, list) else (), template=template)
    if not found:
        return None
    keys = ", ".join(f"{key} ({count} ×)" for key, count in found.most_common())
    return (
        f"{name}: its messages have unused keys: {keys} in the first {len(conversations_)} records; move them into the "
        "content, or remove them"
    )
