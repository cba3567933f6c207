"""Preparation of packed training and validation sequences from a job's data section."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from toolkit.arguments import NotNegative, Positive, checks_arguments
from toolkit.catalog.image_inputs import image_inputs, processor_settings
from toolkit.config.job import Data
from toolkit.data.chat_template import set_chat_template
from toolkit.data.chats import chat_template
from toolkit.data.formats import MixedTokeniser, Tokeniser, TransformersTokenizer, check_tokenizer
from toolkit.data.labelled import LabelledDataset, LabelTokeniser
from toolkit.data.origins import Share
from toolkit.data.packing import PackedDataset
from toolkit.data.processor import Processor
from toolkit.data.sources import Documents, Part, load_documents, progress_bars
from toolkit.data.store import TokenStore, tokenise
from toolkit.data.streaming import BUFFER, StreamedRows, StreamedSource, open_source
from toolkit.dataset_inspection.chat_template import unused_chat_template
from toolkit.dataset_inspection.formats import Format, formats_without_images, image_data_problems
from toolkit.dataset_inspection.inspect import DatasetFacts, check_data
from toolkit.dataset_inspection.labels import Labels, data_of_task
from toolkit.errors import DataError, PlanError, Problem, raise_all
from toolkit.planning.plan import Plan
from toolkit.planning.trainable import data_section_problems, task_problems


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedData:
    """Sequences ready for the loaders; `train.report` and `eval.report` have the statistics of packing.

    `eval_sets` has the validation sets that the job names, in place of `eval`. `warnings` names columns and message keys that nothing reads;
    `sources` has the share of each source in an epoch, which is not known of `StreamedRows`.
    """

    train: PackedDataset | LabelledDataset | StreamedRows
    eval: PackedDataset | LabelledDataset | None
    format: Format | Literal["mixed"]
    warnings: tuple[str, ...] = ()
    sources: tuple[Share, ...] = ()
    eval_sets: dict[str, PackedDataset | LabelledDataset] = field(default_factory=dict)

    @property
    def validation(self) -> dict[str, PackedDataset | LabelledDataset]:
        """The validation sets by name, which is empty for the only one."""
        return self.eval_sets if self.eval is None else {"": self.eval}


@checks_arguments
def prepare(
    data: Data,
    *,
    tokenizer: TransformersTokenizer,
    sequence_length: Positive,
    seed: NotNegative,
    cache_dir: str | Path,
    train_batch_size: Positive = 1,
    vocab_size: Positive | None = None,
    base: str | Path | None = None,
    labels: Labels | None = None,
    num_proc: Positive | None = None,
    progress: bool = False,
) -> PreparedData:
    """Load, tokenise and pack; a second call with the same inputs opens the token files of the first.

    Every rank gets the same result. Call it on the main rank first: the others then find the files in `cache_dir`.

    Args:
        data: The job's data section.
        tokenizer: A `transformers` tokenizer; its template is set to that of `data.chat_template`.
        sequence_length: Tokens per row.
        seed: Seed of the documents that `validation_fraction` holds out.
        cache_dir: Folder for Arrow and token files; shared by ranks or not.
        train_batch_size: Sequences per optimizer step over all ranks; the data must have at least as many.
        vocab_size: Rows of the model's embedding; token ids are not checked if None.
        base: Folder that relative paths start from; the working directory if None.
        labels: Labels of a classifier (`plan.labels`), which the records of its formats (`plan.data`) need.
        num_proc: Number of processes that tokenise; this process if None.
        progress: Whether to show progress bars.
    Raises:
        DataError: Every problem of `check_data`; DATA_HUB, DATA_REVISION, DATA_READ, DATA_NO_EOS, DATA_NO_CHAT_TEMPLATE,
            DATA_LABELS, DATA_LONG_ROWS, DATA_PREPROCESS, DATA_CHAT_TEMPLATE, DATA_CHAT_DROPPED, DATA_CHAT_TEMPLATE_UNUSED, DATA_SLOW_TOKENIZER, DATA_VOCAB,
            DATA_NO_TARGETS, DATA_TOO_SMALL.
    """
    cache_dir, base = Path(cache_dir), None if base is None else Path(base)
    processor = tokenizer if isinstance(tokenizer, Processor) else None
    if processor is not None:
        raise_all(DataError, image_data_problems(data))
        data = data_of_task(data, "image-text-to-text")
    facts = check_data(data, base=base, labels=labels)
    set_chat_template(tokenizer, data, base=base)
    for source in facts.train + facts.eval:
        if source.format is not None:
            check_tokenizer(tokenizer, format_=source.format, loss_on=source.loss_on)
    with progress_bars(progress):
        documents = load_documents(
            data,
            facts,
            seed=seed,
            cache_dir=cache_dir,
            template=chat_template(tokenizer),
            images=processor is not None,
        )
        streamed, unread = _open_streams(data, facts, cache_dir=cache_dir)
        formats = tuple(dict.fromkeys((*(source.kind.format for source in streamed), *documents.formats)))
        if "messages" not in formats:
            raise_all(DataError, unused_chat_template(data, formats[0]))
        if processor is not None:
            raise_all(DataError, formats_without_images(formats))
        parts = {}
        if documents.train is not None:
            parts["data.train" if data.sources is None else "data.sources"] = documents.train
        if documents.eval is not None:
            parts["data.eval" if data.eval is not None else "data.validation_fraction"] = documents.eval
        parts |= {f"data.eval.{name}": part for name, part in documents.eval_sets.items()}
        if labels is not None:
            check_tokenizer(tokenizer, format_=formats[0], loss_on="all")
            rows = _Rows(data, labels, sequence_length, _padding(tokenizer, vocab_size), cache_dir, num_proc)
            labelled = {name: rows.of(part, tokenizer) for name, part in parts.items()}
            return _labelled(
                labelled, parts, documents, data, tokenizer, vocab_size=vocab_size, train_batch_size=train_batch_size
            )
        stores = {
            name: tokenise(
                part.documents, _tokeniser(part, tokenizer, data.system_prompt), cache_dir=cache_dir, num_proc=num_proc
            )
            for name, part in parts.items()
        }
    pad_token_id = _padding(tokenizer, vocab_size)
    problems: list[Problem] = []
    packed: dict[str, PackedDataset] = {}
    stream = None
    if streamed:
        stream = StreamedRows(
            sources=streamed,
            tokenisers=tuple(_stream_tokeniser(source, tokenizer, data.system_prompt) for source in streamed),
            packing=data.packing,
            sequence_length=sequence_length,
            pad_token_id=pad_token_id,
            long_rows=data.long_rows,
            shuffle_buffer=data.shuffle_buffer or BUFFER,
            seed=seed,
            check=partial(_check_vocabulary, tokenizer, vocab_size),
        )
    for part, store in stores.items():
        dataset = PackedDataset(
            store,
            packing=data.packing,
            sequence_length=sequence_length,
            pad_token_id=pad_token_id,
            long_rows=data.long_rows,
            processor=processor,
        )
        if processor is not None:
            problems += _cut_images(dataset, store, parts[part], processor.image_tokens, data)
        if data.long_rows == "refuse":
            problems += _long_problems(np.diff(store.offsets), store.num_empty, parts[part], sequence_length)
        problems += _vocabulary_problems(store.max_token, tokenizer, vocab_size, part=part)
        held_out = stream is not None or bool(packed)
        problems += _size_problems(dataset, data, part=part, needed=1 if held_out else train_batch_size)
        packed[part] = dataset
    raise_all(DataError, problems)
    others = list(packed.values())
    train = others.pop(0) if stream is None else stream
    return PreparedData(
        train=train,
        eval=others[0] if documents.eval is not None else None,
        eval_sets=dict(zip(documents.eval_sets, others, strict=True)) if documents.eval_sets else {},
        format=formats[0] if len(formats) == 1 else "mixed",
        warnings=(*unread, *documents.warnings),
        sources=() if documents.train is None else documents.train.origins.shares(),
    )


@dataclass(frozen=True, slots=True)
class _Rows:
    """What the rows of all parts of a classifier's data have in common."""

    data: Data
    labels: Labels
    sequence_length: int
    pad_token_id: int
    cache_dir: Path
    num_proc: int | None

    def of(self, part: Part, tokenizer: Any) -> LabelledDataset:
        """Tokenise a part."""
        cuts = self.data.long_rows in (None, "truncate")
        tokeniser = LabelTokeniser(
            tokenizer=tokenizer,
            format=part.kinds[0].format,
            labels=self.labels,
            max_length=self.sequence_length if cuts else None,
            origins=part.origins,
        )
        return LabelledDataset(
            part.documents,
            tokeniser,
            sequence_length=self.sequence_length,
            pad_token_id=self.pad_token_id,
            long_rows=self.data.long_rows,
            cache_dir=self.cache_dir,
            num_proc=self.num_proc,
        )


def _labelled(
    rows: dict[str, LabelledDataset],
    parts: Mapping[str, Part],
    documents: Documents,
    data: Data,
    tokenizer: Any,
    *,
    vocab_size: int | None,
    train_batch_size: int,
) -> PreparedData:
    """Return the data of a classifier, after the checks of all its parts."""
    problems: list[Problem] = []
    for at, (part, dataset) in enumerate(rows.items()):
        if data.long_rows == "refuse":
            lengths, empty = dataset.document_tokens, dataset.num_empty
            problems += _long_problems(lengths, empty, parts[part], dataset.sequence_length)
        problems += _vocabulary_problems(dataset.max_token, tokenizer, vocab_size, part=part)
        problems += _size_problems(dataset, data, part=part, needed=1 if at else train_batch_size)
        if dataset.per_token and len(dataset) and not dataset.report.target_tokens:
            message = f"{part}: no tag counts in the loss: each of its words has the tag -100, or no token"
            fix = "Correct the tags, or raise train.sequence_length"
            problems.append(Problem(code="DATA_NO_TARGETS", key=part, message=message, fix=fix))
    raise_all(DataError, problems)
    assert documents.train is not None, "a stream has no labels that are checked"
    train, *others = rows.values()
    return PreparedData(
        train=train,
        eval=others[0] if documents.eval is not None else None,
        eval_sets=dict(zip(documents.eval_sets, others, strict=True)) if documents.eval_sets else {},
        format=documents.formats[0],
        warnings=documents.warnings,
        sources=documents.train.origins.shares(),
    )


def _open_streams(
    data: Data, facts: DatasetFacts, *, cache_dir: Path
) -> tuple[tuple[StreamedSource, ...], tuple[str, ...]]:
    """Return the sources of a streamed job, none for another, and the warnings of what of them is not read."""
    if not data.streaming:
        return (), ()
    opened = [
        open_source(source, wanted, data, key=key, cache_dir=cache_dir)
        for source, (key, wanted) in zip(facts.train, data.sources_of("train"), strict=True)
    ]
    return tuple(source for source, _ in opened), tuple(text for _, unread in opened for text in unread)


def _stream_tokeniser(source: StreamedSource, tokenizer: Any, system_prompt: str | None) -> Tokeniser:
    check_tokenizer(tokenizer, format_=source.kind.format, loss_on=source.kind.loss_on)
    return Tokeniser(tokenizer=tokenizer, system_prompt=system_prompt, **source.kind._asdict())


def _check_vocabulary(tokenizer: Any, vocab_size: int | None, max_token: int, part: str) -> None:
    raise_all(DataError, _vocabulary_problems(max_token, tokenizer, vocab_size, part=part))


def _tokeniser(part: Part, tokenizer: Any, system_prompt: str | None) -> Tokeniser | MixedTokeniser:
    """Return the tokeniser of documents, after a check that the tokenizer supports their formats."""
    for kind in part.kinds:
        check_tokenizer(tokenizer, format_=kind.format, loss_on=kind.loss_on)
    each = tuple(
        Tokeniser(tokenizer=tokenizer, origins=part.origins, system_prompt=system_prompt, **kind._asdict())
        for kind in part.kinds
    )
    return each[0] if len(each) == 1 else MixedTokeniser(parts=each)


def prepare_plan(plan: Plan, tokenizer: TransformersTokenizer, **options: Any) -> PreparedData:
    """Prepare the data of a plan as its run does; `options` are arguments of `prepare` in place of the plan's.

    Raises:
        PlanError: TRAIN_NO_DATA. DataError: As `prepare`.
    """
    raise_all(PlanError, [*data_section_problems(plan.job), *task_problems(plan.settings.task)])
    data = plan.data
    assert data is not None, "said above"
    of_plan: dict[str, Any] = {
        "sequence_length": plan.settings.sequence_length,
        "seed": plan.job.train.seed,
        "cache_dir": plan.output_dir / "cache",
        "train_batch_size": plan.settings.batch.train,
        "vocab_size": plan.model.vocab_size,
        "labels": plan.labels,
    }
    made = prepare(data, tokenizer=tokenizer, **of_plan | options)
    return replace(made, warnings=(*made.warnings, *_image_warnings(plan, made)))


def _image_warnings(plan: Plan, made: PreparedData) -> Iterator[str]:
    """Yield a warning where the images of a document are more than those that the plan's estimate counts."""
    counted = plan.image_inputs
    if counted is None or not isinstance(made.train, PackedDataset) or made.train.images is None:
        return

    def pixels(sizes: Sequence[Sequence[int]]) -> int:
        found = (image_inputs(plan.model.config, (width, height), settings=settings) for width, height in sizes)
        return sum(math.prod(each.tensors[0].shape) for each in found if each is not None)

    settings, number = processor_settings(plan.model.path), plan.settings.images_per_sample
    largest: list[Any] = max(made.train.images["image_sizes"], key=pixels, default=[])
    if pixels(largest) > number * math.prod(counted.tensors[0].shape):
        width, height = max(largest, key=lambda size: size[0] * size[1])
        yield (
            f"a document has {len(largest)} images of up to {width} x {height} pixels, more than the memory estimate counts: set "
            f"train.images_per_sample to {len(largest)} and train.image_size to [{width}, {height}]"
        )


def _padding(tokenizer: Any, vocab_size: int | None) -> int:
    """Return the id of the padding token: any works, as it is neither in the loss nor attended to; `pad_token` reads best."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None and (vocab_size is None or token < vocab_size):
            return int(token)
    return 0


def _vocabulary_problems(max_token: int, tokenizer: Any, vocab_size: int | None, *, part: str) -> list[Problem]:
    """Check the ids that occur: published tokenizers may have more tokens than the model, which never occur in text."""
    if vocab_size is None or max_token < vocab_size:
        return []
    message = (
        f"token id={max_token} in {part} is not below vocab_size={vocab_size} of the model (the tokenizer has"
        f" {len(tokenizer)} tokens): the model has no embedding for it"
    )
    fix = "Name the model's own tokenizer, or a model whose embedding was resized to the tokenizer"
    return [Problem(code="DATA_VOCAB", key="model.tokenizer", message=message, fix=fix)]


def _long_problems(lengths: np.ndarray, num_empty: int, part: Part, sequence_length: int) -> list[Problem]:
    """Return the problem of documents longer than a row, with the place of the first where it is known."""
    long = np.flatnonzero(lengths > sequence_length)
    if not len(long):
        return []
    first = int(long[0])
    # Documents without a token are not in the store, so with any of them its numbers are others than those of the records.
    key, where = ("data.long_rows", "a document") if num_empty else part.origins.of(first)
    more = f", as {len(long) - 1:,} more do, the longest {int(lengths.max()):,}" if len(long) > 1 else ""
    message = (
        f"{where} has {int(lengths[first]):,} tokens{more}, and train.sequence_length={sequence_length} under "
        "data.long_rows=refuse"
    )
    fix = "Raise train.sequence_length, or set data.long_rows to truncate, split or drop"
    return [Problem(code="DATA_LONG_ROWS", key=key, message=message, fix=fix)]


def _cut_images(
    dataset: PackedDataset, store: TokenStore, part: Part, image_tokens: frozenset[int], data: Data
) -> list[Problem]:
    """Return the problem of documents whose images do not fit a row, which would lose a part of one."""
    size = dataset.sequence_length
    for document in dataset.row_documents.tolist():
        start, stop = int(store.offsets[document]), int(store.offsets[document + 1])
        rest = store.tokens[start + size : stop]
        if data.long_rows != "drop" and len(rest) and np.isin(rest, list(image_tokens)).any():
            key, where = part.origins.of(int(store.images[document]["record"]))
            message = f"{where} has {stop - start:,} tokens, and train.sequence_length={size} would cut off images or parts of them"
            fix = "Raise train.sequence_length, give the processor fewer pixels, or set data.long_rows to drop"
            return [Problem(code="DATA_IMAGE", key=key, message=message, fix=fix)]
    return []


def _size_problems(dataset: PackedDataset | LabelledDataset, data: Data, *, part: str, needed: int) -> list[Problem]:
    report = dataset.report
    if report.dropped_sequences and not report.sequences:
        roles = None if isinstance(data.loss_on, str) else ", ".join(data.loss_on)
        message = (
            f"{part}: data.loss_on={roles or data.loss_on} leaves no token in the loss in {report.documents} documents of rows "
            f"of train.sequence_length={dataset.sequence_length}"
        )
        fix = "Raise train.sequence_length above the longest prompt, or set data.loss_on to all"
        if roles is not None:
            fix = f"Name roles that messages have, such as assistant; else {fix[0].lower()}{fix[1:]}"
        return [Problem(code="DATA_NO_TARGETS", key="data.loss_on", message=message, fix=fix)]
    if report.sequences >= needed:
        return []
    need = f"fewer than train_batch_size={needed}: one optimizer step needs that many" if needed > 1 else "none to use"
    message = (
        f"{part} of {report.documents} documents gives sequences={report.sequences} of"
        f" train.sequence_length={dataset.sequence_length} under data.packing={dataset.packing}, {need}"
    )
    smaller = f", lower train_batch_size to at most {report.sequences}" if report.sequences else ""
    shorter = "" if dataset.packing == "none" else ", lower train.sequence_length or set data.packing to none"
    fix = f"Give more documents{shorter}{smaller}"
    return [Problem(code="DATA_TOO_SMALL", key=part, message=message, fix=fix)]
