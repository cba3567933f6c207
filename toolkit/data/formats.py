"""Tokenising: a document becomes token ids and a mark on each token that the loss counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.data.chat_template import TEMPLATE_FAULTS, reason_of
from toolkit.errors import DataError, Problem
from toolkit.spec.chat_template import NO_CHAT_TEMPLATE_FIX
from toolkit.spec.dataset_formats import Format, loss_on_problem, record_fault
from toolkit.spec.tokenizer import GENERATION_MARK, template_fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokeniser:
    """Turns a batch of records into `input_ids` and `targets`, for `datasets.Dataset.map`.

    text: tokens, end mark. prompt_completion: prompt, completion, end mark. messages: the chat template, which sets
    its own end marks. Tokens that the tokenizer adds in front (`bos`) are kept. Empty documents give no tokens.

    Args:
        tokenizer: A `transformers` tokenizer.
        format: Of the records.
        loss_on: `all`, `completion` or `assistant`.
    """

    tokenizer: Any
    format: Format
    loss_on: str

    def __call__(self, batch: Mapping[str, list[Any]], indices: list[int]) -> dict[str, list[list[int]]]:
        """Tokenises; `targets` holds 1 for each token that counts, else 0.

        Raises:
            DataError: DATA_TYPE, naming the record; DATA_CHAT_TEMPLATE.
        """
        records = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        if self.format == "messages":
            records = [{"messages": _without_nulls(record["messages"])} for record in records]
        for index, record in zip(indices, records, strict=True):
            if (fault := record_fault(record, self.format)) is not None:
                message = f"record {index + 1} of the data: {fault}"
                fix = "Correct or remove the record"
                raise DataError.of(code="DATA_TYPE", key="data", message=message, fix=fix)
        if self.format == "messages":
            documents = self._chats(records, indices)
        else:
            documents = self._texts(records) if self.format == "text" else self._pairs(records)
        return {"input_ids": [ids for ids, _ in documents], "targets": [targets for _, targets in documents]}

    def _texts(self, records: list[dict[str, Any]]) -> list[tuple[list[int], list[int]]]:
        encoded = self._encode([record["text"] for record in records])
        ended = [self._end(ids) if record["text"].strip() else [] for ids, record in zip(encoded, records, strict=True)]
        return [(ids, [1] * len(ids)) for ids in ended]

    def _pairs(self, records: list[dict[str, Any]]) -> list[tuple[list[int], list[int]]]:
        prompts = [self._open(ids) for ids in self._encode([record["prompt"] for record in records])]
        wholes = self._encode([record["prompt"] + record["completion"] for record in records])
        documents: list[tuple[list[int], list[int]]] = []
        for record, prompt, whole in zip(records, prompts, wholes, strict=True):
            if not record["completion"]:
                documents.append(([], []))
                continue
            if whole[: len(prompt)] != prompt:
                # A token spans the boundary, which the model will never see at inference.
                completion = self.tokenizer(record["completion"], add_special_tokens=False, verbose=False)
                whole = prompt + completion["input_ids"]
            ids = self._end(whole)
            on_prompt = int(self.loss_on == "all")
            documents.append((ids, [on_prompt] * len(prompt) + [1] * (len(ids) - len(prompt))))
        return documents

    def _chats(self, records: list[dict[str, Any]], indices: list[int]) -> list[tuple[list[int], list[int]]]:
        tokenise = self._whole_chat
        if self.loss_on == "assistant":
            tagged = GENERATION_MARK.search(chat_template(self.tokenizer) or "") is not None
            tokenise = self._tagged_chat if tagged else self._located_chat
        documents = []
        for index, record in zip(indices, records, strict=True):
            try:
                documents.append(tokenise(record["messages"]))
            except TEMPLATE_FAULTS as error:  # many templates demand that roles alternate, or know no system message
                message = f"record {index + 1} of the data: the chat template does not render it: {reason_of(error)}"
                fix = "Correct or remove the record, or set data.chat_template to a template that takes it"
                raise DataError.of(code="DATA_CHAT_TEMPLATE", key="data", message=message, fix=fix) from error
        return documents

    def _whole_chat(self, messages: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
        ids = self.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
        return ids, [1] * len(ids)

    def _tagged_chat(self, messages: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
        """For a template that marks what the assistant says with `{% generation %}`."""
        encoded = self.tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return encoded["input_ids"], [int(mark) for mark in encoded["assistant_masks"]]

    def _located_chat(self, messages: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
        """For any other template: finds each assistant turn in the rendered text, then the tokens that overlap it."""

        def render(upto: int, **options: bool) -> str:
            rendered: str = self.tokenizer.apply_chat_template(messages[:upto], tokenize=False, **options)
            return rendered

        spans = assistant_spans(messages, render)
        encoded = self.tokenizer(
            render(len(messages)), add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        targets = [
            int(any(start < stop_char and stop > start_char for start_char, stop_char in spans))
            for start, stop in encoded["offset_mapping"]
        ]
        return encoded["input_ids"], targets

    def _encode(self, texts: list[str]) -> list[list[int]]:
        encoded: list[list[int]] = self.tokenizer(texts, verbose=False)["input_ids"]
        return encoded

    def _open(self, ids: list[int]) -> list[int]:
        """Takes off the end mark that some tokenizers add by themselves: the prompt goes on."""
        return ids[:-1] if ids and ids[-1] == self.tokenizer.eos_token_id else ids

    def _end(self, ids: list[int]) -> list[int]:
        return [*self._open(ids), self.tokenizer.eos_token_id]


def chat_template(tokenizer: Any) -> str | None:
    """Gives the template that `apply_chat_template` uses, or None when the tokenizer has none."""
    try:
        template: str = tokenizer.get_chat_template()
    except (ValueError, AttributeError):
        return None
    return template


def check_tokenizer(tokenizer: Any, *, format_: Format, loss_on: str) -> None:
    """Checks that the tokenizer can turn this format into documents.

    Raises:
        DataError: DATA_NO_EOS, DATA_NO_CHAT_TEMPLATE, DATA_LOSS_ON, DATA_SLOW_TOKENIZER, TOKENIZER_INVALID.
    """
    problems: list[Problem] = []
    if problem := loss_on_problem(loss_on, format_):
        problems.append(problem)
    name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
    if format_ != "messages" and tokenizer.eos_token_id is None:
        message = f"the tokenizer {name} has no eos_token, so nothing would mark where a document ends"
        fix = "Set eos_token in its tokenizer_config.json, or name another tokenizer in model.tokenizer"
        problems.append(Problem(code="DATA_NO_EOS", key="model.tokenizer", message=message, fix=fix))
    template = chat_template(tokenizer) if format_ == "messages" else None
    if fault := template_fault(template):
        message, fix = f"the tokenizer {name} cannot be used: {fault}", "Set its chat_template to a text"
        raise DataError.of(code="TOKENIZER_INVALID", key="model.tokenizer", message=message, fix=fix)
    if format_ == "messages" and template is None:
        message = f"the tokenizer {name} has no chat template, which data of the format messages needs"
        problems.append(
            Problem(code="DATA_NO_CHAT_TEMPLATE", key="model.tokenizer", message=message, fix=NO_CHAT_TEMPLATE_FIX)
        )
    untagged = template is not None and not GENERATION_MARK.search(template)
    if loss_on == "assistant" and untagged and not getattr(tokenizer, "is_fast", False):
        message = (
            f"data.loss_on=assistant: the tokenizer {name} gives no character offsets to find the assistant's tokens by"
        )
        fix = "Set data.loss_on to all, or put {% generation %} around the assistant's turns in the chat template"
        problems.append(Problem(code="DATA_SLOW_TOKENIZER", key="data.loss_on", message=message, fix=fix))
    if problems:
        raise DataError(*problems)


def assistant_spans(messages: list[dict[str, Any]], render: Callable[..., str]) -> list[tuple[int, int]]:
    """Finds what the assistant writes, end marks included, in a rendered conversation.

    A turn starts where the conversation before it, opened for the assistant, ends.

    Args:
        messages: The conversation.
        render: `render(n)` gives the text of the first n messages; it takes `add_generation_prompt`.
    Returns:
        (start, stop) in characters of `render(len(messages))`, one an assistant message.
    Raises:
        DataError: DATA_CHAT_TEMPLATE, if the template rewrites earlier turns so that they cannot be found.
    """
    whole = render(len(messages))
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        opened, closed = render(index, add_generation_prompt=True), render(index + 1)
        start = len(opened)
        stop = len(closed) if whole.startswith(closed) else _stop_by_content(whole, closed, message, start)
        if not whole.startswith(opened) or stop is None:
            message_text = (
                f"data.loss_on=assistant: the chat template rewrites turn {index + 1} as the conversation goes on"
            )
            fix = "Put {% generation %} around the assistant's turns in the template, or set data.loss_on to all"
            raise DataError.of(code="DATA_CHAT_TEMPLATE", key="data.loss_on", message=message_text, fix=fix)
        spans.append((start, stop))
    return spans


def _stop_by_content(whole: str, closed: str, message: dict[str, Any], start: int) -> int | None:
    """Finds a turn's end by its content and the end mark after it.

    Templates of reasoning models wrap the last turn otherwise than earlier ones, so `closed` is no prefix of `whole`.
    """
    said = (message.get("content") or "").split("</think>")[-1].strip()
    at = whole.find(said, start)
    if not said or at < 0 or said not in closed:
        return None
    end_mark = closed[closed.rindex(said) + len(said) :]
    stop = at + len(said) + len(end_mark)
    return stop if whole[at + len(said) : stop] == end_mark else None


def _without_nulls(messages: Any) -> Any:
    """Drops the keys that Arrow fills with null because another message has them."""
    if not isinstance(messages, list):
        return messages
    return [
        {name: value for name, value in message.items() if value is not None}
        if isinstance(message, Mapping)
        else message
        for message in messages
    ]
