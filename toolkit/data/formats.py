"""Tokenisation of documents into token ids and a mark on each token in the loss."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import datasets

from toolkit.catalog.tokenizer import template_fault
from toolkit.config.job import LossOn
from toolkit.data.chats import ChatTokeniser, Places, chat_template
from toolkit.data.images import read_image
from toolkit.data.processor import Processor
from toolkit.dataset_inspection.chat_messages import learned_roles
from toolkit.dataset_inspection.chat_template import NO_CHAT_TEMPLATE_FIX
from toolkit.dataset_inspection.formats import Format, loss_on_problem, record_fault
from toolkit.dataset_inspection.image_messages import column_images, split_images, text_fault
from toolkit.dataset_inspection.image_sources import ImageSource, image_error, image_name, image_source
from toolkit.errors import DataError, Problem
from toolkit.modeling.loss import IGNORED

# Column of conversations as JSON, used if several files have different keys.
CONVERSATION = "conversation"
# Column with the index of a document's source, where sources differ in format or in what of them is learned.
SOURCE = "source"


@runtime_checkable
class TransformersTokenizer(Protocol):
    """The interface of a `transformers` tokenizer that is checked; its attributes are created on access."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def __len__(self) -> int: ...

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any: ...


class Located(Protocol):
    """Knows the key path and the place of a record, and the folder of its file."""

    def of(self, index: int) -> tuple[str, str]: ...

    def folder(self, index: int) -> Path: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokeniser:
    """Turns a batch of records into `input_ids` and `targets`, for `datasets.Dataset.map`.

    text: tokens, EOS. prompt_completion: prompt, completion, EOS. messages: the chat template, which has its own end
    tokens. tokens: those given, without the ones that `attention_mask` leaves out. A BOS token that the tokenizer adds is kept.
    Empty documents give no tokens.

    Args:
        tokenizer: A `transformers` tokenizer.
        format: Format of the records.
        loss_on: As `data.loss_on`.
        system_prompt: As `data.system_prompt`.
        origins: Where the records come from, for errors; None if only their number is known.
    """

    tokenizer: Any
    format: Format
    loss_on: LossOn
    system_prompt: str | None = None
    origins: Located | None = None

    @property
    def identity(self) -> tuple[str, ...]:
        """What the tokens depend on besides tokenizer and documents."""
        learned = self.loss_on if isinstance(self.loss_on, str) else f"roles {' '.join(sorted(set(self.loss_on)))}"
        prompt = () if self.system_prompt is None or self.format != "messages" else (self.system_prompt,)
        return (self.format, learned, *prompt, *(self.tokenizer.identity if self.reads_images else ()))

    @property
    def reads_images(self) -> bool:
        """Whether messages may have images."""
        return isinstance(self.tokenizer, Processor)

    @property
    def columns(self) -> dict[str, Any]:
        """The columns that a call returns, as features of `datasets`."""
        numbers = datasets.Sequence(datasets.Value("int32"))
        columns = {"input_ids": numbers, "targets": numbers}
        if not self.reads_images:
            return columns
        source = {"path": datasets.Value("string"), "bytes": datasets.Value("binary")}
        return {**columns, "images": [source], "image_sizes": datasets.Sequence(numbers)}

    def __call__(self, batch: Mapping[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        """Tokenise a batch; `targets` has 1 for each token in the loss, else 0.

        Raises:
            DataError: DATA_TYPE, DATA_IMAGE, naming the record; those of `ChatTokeniser`.
        """
        if CONVERSATION in batch:
            records = [json.loads(text) for text in batch[CONVERSATION]]
        else:
            records = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        for index, record in zip(indices, records, strict=True):
            if (fault := record_fault(record, self.format)) is not None:
                key, where = self._origin(index)
                message, fix = f"{where}: {fault}", "Correct or remove the record"
                raise DataError.of(code="DATA_TYPE", key=key, message=message, fix=fix)
        if self.reads_images:
            return self._with_images(records, indices)
        if self.format == "messages":
            chats = ChatTokeniser(
                tokenizer=self.tokenizer,
                loss_on=self.loss_on,
                origin=self._origin,
                system_prompt=self.system_prompt,
            )
            for index, record in zip(indices, records, strict=True):
                self._refuse_images(record, index)
            documents = [chats(record, index=index) for index, record in zip(indices, records, strict=True)]
        elif self.format == "tokens":
            documents = [_given(record) for record in records]
        else:
            documents = self._texts(records) if self.format == "text" else self._pairs(records)
        return {"input_ids": [ids for ids, _ in documents], "targets": [targets for _, targets in documents]}

    def _with_images(self, records: Sequence[Mapping[str, Any]], indices: Sequence[int]) -> dict[str, list[Any]]:
        """Tokenise messages with images; `images` has where they are, and `image_sizes` their width and height."""
        made: dict[str, list[Any]] = {name: [] for name in self.columns}
        for index, record in zip(indices, records, strict=True):
            key, where = self._origin(index)
            try:
                messages, given = split_images(record["messages"], column_images(record))
                folder = Path() if self.origins is None else self.origins.folder(index)
                sources = [image_source(value, folder=folder) for value in given]
                sizes = [read_image(source).size for source in sources]
                expansions = tuple(map(self._expansion, sources, sizes))
            except ValueError as error:
                raise image_error(str(error), where=where, key=key) from None
            chat = ChatTokeniser(
                tokenizer=self.tokenizer.tokenizer,
                loss_on=self.loss_on,
                origin=self._origin,
                system_prompt=self.system_prompt,
                places=Places(placeholder=self.tokenizer.placeholder, expansions=expansions),
            )
            ids, targets = chat({**record, "messages": messages}, index=index)
            values = (ids, targets, sources, [list(size) for size in sizes])
            for name, value in zip(made, values, strict=True):
                made[name].append(value)
        return made

    def _expansion(self, source: ImageSource, size: tuple[int, int]) -> str:
        try:
            return str(self.tokenizer.expansion(size))
        except ValueError as error:  # of the processor, such as one for a very long and narrow image
            raise ValueError(f"{image_name(source)} of {size[0]} × {size[1]} pixels cannot be read: {error}") from None

    def _refuse_images(self, record: Mapping[str, Any], index: int) -> None:
        if (fault := text_fault(record["messages"])) is not None:
            key, where = self._origin(index)
            fix = "Write the content as a string, or name a model that reads images"
            raise DataError.of(code="DATA_TYPE", key=key, message=f"{where}: {fault}", fix=fix)

    def _origin(self, index: int) -> tuple[str, str]:
        return ("data", f"record {index + 1} of the data") if self.origins is None else self.origins.of(index)

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
                # A token would span the boundary, which the model never sees at inference.
                completion = self.tokenizer(record["completion"], add_special_tokens=False, verbose=False)
                whole = prompt + completion["input_ids"]
            ids = self._end(whole)
            on_prompt = int(self.loss_on == "all")
            documents.append((ids, [on_prompt] * len(prompt) + [1] * (len(ids) - len(prompt))))
        return documents

    def _encode(self, texts: list[str]) -> list[list[int]]:
        encoded: list[list[int]] = self.tokenizer(texts, verbose=False)["input_ids"]
        return encoded

    def _open(self, ids: list[int]) -> list[int]:
        """Remove the EOS token that some tokenizers add, since the completion follows the prompt."""
        return ids[:-1] if ids and ids[-1] == self.tokenizer.eos_token_id else ids

    def _end(self, ids: list[int]) -> list[int]:
        return [*self._open(ids), self.tokenizer.eos_token_id]


def _given(record: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """Return the tokens of a record that has them, and which of them its labels count."""
    ids = record["input_ids"]
    labels, mask = record.get("labels") or ids, record.get("attention_mask") or [1] * len(ids)
    kept = [at for at, attended in enumerate(mask) if attended]
    return [ids[at] for at in kept], [int(labels[at] != IGNORED) for at in kept]


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedTokeniser:
    """Turns a batch of records of several sources into tokens, each record by the tokeniser of its source.

    Args:
        parts: Tokeniser of each source, all with one tokenizer.
    """

    parts: tuple[Tokeniser, ...]

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of all parts."""
        return self.parts[0].tokenizer

    @property
    def columns(self) -> dict[str, Any]:
        """The columns that a call returns, as features of `datasets`."""
        return self.parts[0].columns

    @property
    def identity(self) -> tuple[str, ...]:
        """What the tokens depend on besides tokenizer and documents."""
        return tuple(value for part in self.parts for value in part.identity)

    def __call__(self, batch: Mapping[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        """Tokenise a batch in its order, as `Tokeniser` does."""
        documents: dict[int, tuple[Any, ...]] = {}
        for number in sorted(set(batch[SOURCE])):
            rows = [row for row, source in enumerate(batch[SOURCE]) if source == number]
            records = {CONVERSATION: [batch[CONVERSATION][row] for row in rows]}
            made = self.parts[number](records, [indices[row] for row in rows])
            documents |= dict(zip(rows, zip(*(made[name] for name in self.columns), strict=True), strict=True))
        made_of = [documents[row] for row in range(len(indices))]
        return {name: [values[at] for values in made_of] for at, name in enumerate(self.columns)}


def check_tokenizer(tokenizer: Any, *, format_: Format, loss_on: LossOn) -> None:
    """Check that the tokenizer supports a format.

    Raises:
        DataError: DATA_NO_EOS, DATA_NO_CHAT_TEMPLATE, DATA_LOSS_ON, DATA_SLOW_TOKENIZER, TOKENIZER_INVALID.
    """
    problems: list[Problem] = []
    if problem := loss_on_problem(loss_on, format_):
        problems.append(problem)
    name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
    if format_ == "tokens_tags" and not getattr(tokenizer, "is_fast", False):
        message = f"the tokenizer {name} has no character offsets, which are needed to find the tokens of a word"
        fix = "Name a tokenizer that has a tokenizer.json in model.tokenizer"
        problems.append(Problem(code="DATA_SLOW_TOKENIZER", key="model.tokenizer", message=message, fix=fix))
    if format_ in ("text", "prompt_completion") and tokenizer.eos_token_id is None:
        message = f"the tokenizer {name} has no eos_token, so nothing would mark the end of a document"
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
    if learned_roles(loss_on) is not None and template is not None and not getattr(tokenizer, "is_fast", False):
        message = (
            f"data.loss_on={loss_on if isinstance(loss_on, str) else ', '.join(loss_on)}: the tokenizer {name} has no "
            "character offsets, which are needed to find the tokens of a message"
        )
        fix = "Set data.loss_on to all, or name a tokenizer that has a tokenizer.json in model.tokenizer"
        problems.append(Problem(code="DATA_SLOW_TOKENIZER", key="data.loss_on", message=message, fix=fix))
    if problems:
        raise DataError(*problems)
