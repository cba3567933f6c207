"""Tokenisation of conversations: the text that the chat template renders, and a mark on each token in the loss."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from toolkit.config.job import LossOn
from toolkit.data.chat_template import TEMPLATE_FAULTS
from toolkit.dataset_inspection.chat_messages import (
    Messages,
    dropped,
    dropped_problem,
    for_template,
    is_left_out,
    learned_messages,
    learned_roles,
    learning_fault,
    tools_of,
    with_system_prompt,
)
from toolkit.dataset_inspection.chat_template import refused_problem
from toolkit.dataset_inspection.image_messages import as_lists, texts_of
from toolkit.errors import DataError, first_line

# The Jinja block tag, with optional whitespace control.
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# (start, stop) in characters of a rendered conversation.
Spans = list[tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The places of a conversation's images in its text.

    Args:
        placeholder: Text that the template writes for an image.
        expansions: Text that each image becomes, in order.
    """

    placeholder: str
    expansions: tuple[str, ...]

    def fault(self, rendered: str) -> str | None:
        """Return why a rendered conversation does not have a place for each image; None if it does."""
        found = rendered.count(self.placeholder)
        if found == len(self.expansions):
            return None
        return (
            f"it writes {self.placeholder} {found} times for {len(self.expansions)} images, so they do not match: the template has "
            "no place for images, or a text has that mark itself"
        )

    def expand(self, rendered: str) -> str:
        """Return a rendered conversation, or the beginning of it, with the text that each image becomes."""
        head, *rest = rendered.split(self.placeholder)
        return head + "".join(f"{new}{part}" for new, part in zip(self.expansions, rest, strict=False))

    def spans(self, text: str) -> Spans:
        """Return where the images are in an expanded text."""
        found, at = [], 0
        for expansion in self.expansions:
            start = text.index(expansion, at)
            at = start + len(expansion)
            found.append((start, at))
        return found

    def moved(self, rendered: str, spans: Spans) -> Spans:
        """Return spans of a rendered conversation as those of the expanded text."""
        ends = [found.end() for found in re.finditer(re.escape(self.placeholder), rendered)]
        grown = [len(expansion) - len(self.placeholder) for expansion in self.expansions]

        def place(at: int) -> int:
            return at + sum(more for end, more in zip(ends, grown, strict=True) if end <= at)

        return [(place(start), place(stop)) for start, stop in spans]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTokeniser:
    """Turns a conversation into token ids and targets.

    Args:
        tokenizer: A `transformers` tokenizer with a chat template.
        loss_on: `all`, `assistant` for assistant messages alone, `last_assistant` for the last of them, or roles. Messages
            whose own keys exclude them from the loss never count.
        system_prompt: System message of conversations that have none.
        origin: `origin(index)` returns the key path and the place of a record, for errors.
        places: What the images of the record become in its text; None for text alone.
    """

    tokenizer: Any
    loss_on: LossOn
    origin: Callable[[int], tuple[str, str]]
    system_prompt: str | None = None
    places: Places | None = None

    def __call__(self, record: Mapping[str, Any], *, index: int) -> tuple[list[int], list[int]]:
        """Tokenise a record of `messages` and, if it has them, `tools`.

        Args:
            record: Record with valid messages (`record_fault`).
            index: Index of the record, from 0, for errors.
        Returns:
            Token ids, and 1 for each token in the loss, else 0.
        Raises:
            DataError: DATA_TYPE; DATA_CHAT_TEMPLATE, if the template does not render it or answers cannot be located;
                DATA_CHAT_DROPPED, if the template leaves out a part of it; DATA_SLOW_TOKENIZER.
        """
        try:
            if (fault := learning_fault(record["messages"], self.loss_on)) is not None:
                raise ValueError(fault)
            tools = tools_of(record)
        except ValueError as error:
            key, where = self.origin(index)
            fix = "Correct or remove the record"
            raise DataError.of(code="DATA_TYPE", key=key, message=f"{where}: {error}", fix=fix) from None
        messages = with_system_prompt(record["messages"], self.system_prompt)
        if self.places is not None:  # templates of image models read content as lists alone, that of the prompt too
            messages = as_lists(messages)
        try:
            return self._tokenise(messages, tools, index=index)
        except TEMPLATE_FAULTS as error:  # many templates require alternating roles, or have no system message
            raise self._refused(first_line(error), index) from error

    def _refused(self, reason: str, index: int) -> DataError:
        key, where = self.origin(index)
        return DataError(refused_problem(reason, where=where, key=key))

    def _tokenise(self, written: Messages, tools: Any, *, index: int) -> tuple[list[int], list[int]]:
        left_out = {at for at, message in enumerate(written) if is_left_out(message)}
        messages, learned = for_template(written), learned_messages(written, self.loss_on)
        rendered = self._rendered(messages, tools)
        if (part := dropped(messages, tools, rendered, self._rendered)) is not None:
            key, where = self.origin(index)
            raise DataError(dropped_problem(part, where=where, key=key))
        if self.places is not None and (fault := self.places.fault(rendered)) is not None:
            raise self._refused(fault, index)
        text = rendered if self.places is None else self.places.expand(rendered)
        if self.loss_on == "all" and not left_out and (self.places is None or not self.places.expansions):
            ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            return ids, [1] * len(ids)

        def render(upto: int, **options: bool) -> str:
            return self._render(messages[:upto], tools, **options)

        if self.loss_on == "all":
            return self._marked(text, [(0, len(text))], but=message_spans(messages, render, left_out))
        marks_answers = _GENERATION.search(chat_template(self.tokenizer) or "") is not None
        if not marks_answers or learned_roles(self.loss_on) != frozenset({"assistant"}):
            return self._marked(text, message_spans(messages, render, learned))
        blocks = self._blocks(messages, tools, len(messages))
        moved = (lambda spans: spans) if self.places is None else partial(self.places.moved, rendered)
        if self.loss_on == "last_assistant":
            return self._marked(text, moved(self._blocks_of(messages, tools, blocks, learned, index=index)))
        others = self._blocks_of(messages, tools, blocks, left_out, index=index)
        return self._marked(text, moved(blocks), but=moved(others))

    def _rendered(self, messages: Messages, tools: Any, **options: bool) -> str:
        rendered: str = self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options)
        return rendered

    def _render(self, messages: Messages, tools: Any, **options: bool) -> str:
        rendered = self._rendered(messages, tools, **options)
        return rendered if self.places is None else self.places.expand(rendered)

    def _blocks(self, messages: Messages, tools: Any, upto: int) -> Spans:
        """Return the spans that a template marks with `{% generation %}` in the first messages."""
        if not upto:
            return []
        _, [blocks] = render_jinja_template(
            [messages[:upto]],
            tools=tools,
            chat_template=self.tokenizer.get_chat_template(tools=tools),
            return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map,
        )
        return list(blocks)

    def _blocks_of(
        self, messages: Messages, tools: Any, blocks: Spans, chosen: Collection[int], *, index: int
    ) -> Spans:
        """Return the blocks of some messages: those added when the conversation is extended by the message."""
        found: Spans = []
        for at in sorted(chosen):
            before, after = (len(self._blocks(messages, tools, upto)) for upto in (at, at + 1))
            if after > len(blocks) or after < before:
                reason = f"the first {at + 1} messages alone mark other answers than the whole conversation"
                raise self._refused(reason, index)
            found += blocks[before:after]
        return found

    def _marked(self, text: str, spans: Spans, *, but: Iterable[tuple[int, int]] = ()) -> tuple[list[int], list[int]]:
        """Tokenise a text and mark the tokens that overlap a span of `spans`, except those that overlap one of `but`."""
        if not getattr(self.tokenizer, "is_fast", False):
            raise DataError.of(
                code="DATA_SLOW_TOKENIZER",
                key="data.loss_on",
                message="the tokenizer has no character offsets, which are needed to leave messages out of the loss",
                fix="Name a model with a tokenizer.json in model.tokenizer, or remove such messages",
            )
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        offsets, others = encoded["offset_mapping"], [*but, *(() if self.places is None else self.places.spans(text))]
        targets = [int(_overlaps(token, spans) and not _overlaps(token, others)) for token in offsets]
        return encoded["input_ids"], targets


def _overlaps(token: tuple[int, int], spans: Iterable[tuple[int, int]]) -> bool:
    return any(token[0] < stop and token[1] > start for start, stop in spans)


def chat_template(tokenizer: Any) -> str | None:
    """Return the template that `apply_chat_template` uses, or None if the tokenizer has none."""
    try:
        template: str = tokenizer.get_chat_template()
    except (ValueError, AttributeError):
        return None
    return template


def message_spans(messages: Messages, render: Callable[..., str], chosen: Collection[int]) -> Spans:
    """Find the spans of some messages, end tokens included, in a rendered conversation.

    A turn starts where the conversation before it ends; an assistant turn, after the generation prompt.

    Args:
        messages: The conversation.
        render: `render(n)` returns the text of the first n messages; it accepts `add_generation_prompt`.
        chosen: Indices of the messages.
    Returns:
        (start, stop) in characters of `render(len(messages))`, one per chosen message.
    Raises:
        DataError: DATA_CHAT_TEMPLATE, if the template rewrites earlier turns so that they cannot be found.
    """
    whole = render(len(messages))
    spans = []
    for index in sorted(chosen):
        message = messages[index]
        opened = render(index, add_generation_prompt=message["role"] == "assistant") if index else ""
        closed = render(index + 1)
        start = len(opened)
        stop = len(closed) if whole.startswith(closed) else _stop_by_content(whole, closed, message, start)
        if not whole.startswith(opened) or stop is None:
            raise DataError.of(
                code="DATA_CHAT_TEMPLATE",
                key="data.loss_on",
                message=f"the chat template rewrites turn {index + 1} when later turns follow, so its tokens cannot "
                "be located",
                fix="Put {% generation %} around the assistant's turns in the template, or set data.loss_on to all",
            )
        spans.append((start, stop))
    return spans


def _stop_by_content(whole: str, closed: str, message: dict[str, Any], start: int) -> int | None:
    """Find the end of a turn by its content and the end token after it.

    Templates of reasoning models render the last turn differently from earlier ones, so `closed` is not a prefix of `whole`.
    """
    said = "".join(texts_of(message.get("content"))[-1:]).split("</think>")[-1].strip()
    at = whole.find(said, start)
    if not said or at < 0 or said not in closed:
        return None
    end_mark = closed[closed.rindex(said) + len(said) :]
    stop = at + len(said) + len(end_mark)
    return stop if whole[at + len(said) : stop] == end_mark else None
