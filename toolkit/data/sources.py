"""Loading of files, saved folders and hub ids as one `datasets.Dataset` of documents in a known format."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
from huggingface_hub import HfApi
from huggingface_hub.errors import RevisionNotFoundError

from toolkit.config.job import Data, EvalSource, LossOn
from toolkit.data.formats import CONVERSATION, SOURCE
from toolkit.data.origins import Origins, place_of
from toolkit.data.preprocess import preprocessed
from toolkit.dataset_inspection.chats import unread_key_warning
from toolkit.dataset_inspection.columns import renamed, resolve_layout
from toolkit.dataset_inspection.files import PEEK_RECORDS, first_bad_json_line, wide_cells
from toolkit.dataset_inspection.formats import Format, setting_of, split_of
from toolkit.dataset_inspection.image_messages import IMAGE_COLUMNS
from toolkit.dataset_inspection.inspect import DatasetFacts, SourceFacts, unread_warning
from toolkit.dataset_inspection.layouts import ALPACA_CHAT, Layout, unread_columns
from toolkit.errors import DataError, Problem

_COMMIT = re.compile(r"[0-9a-f]{40}")
# Increased when the conversion of a layout changes: cached files of earlier versions are then not used.
_LAYOUT_VERSION = 2
# Streams of the seed from which fractions of sources are drawn; those of epochs are smaller.
_DRAWN = 2**32
_BUILDERS = {"jsonl": "json", "json": "json", "txt": "text", "csv": "csv", "parquet": "parquet"}


@contextmanager
def progress_bars(shown: bool) -> Iterator[None]:
    """Show or hide the progress bars of `datasets` for a block, and restore the setting afterwards."""
    before = datasets.are_progress_bars_disabled()
    switch = datasets.enable_progress_bars if shown else datasets.disable_progress_bars
    switch()
    try:
        yield
    finally:
        (datasets.disable_progress_bars if before else datasets.enable_progress_bars)()


class Kind(NamedTuple):
    """How the documents of a source are tokenised."""

    format: Format
    loss_on: LossOn


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The documents of training or validation.

    Args:
        documents: A `Dataset` in our own columns.
        origins: Where they come from.
        kinds: Their kind, or if sources differ in it the kind of each, which the column `SOURCE` chooses.
    """

    documents: Any
    origins: Origins
    kinds: tuple[Kind, ...]

    def select(self, rows: np.ndarray) -> Part:
        """Return the documents of these rows, which may be repeated."""
        return replace(self, documents=self.documents.select(rows), origins=replace(self.origins, rows=rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """The documents of a job to train on and to validate on, in one set or in named ones, and warnings of what is not read; `train` is
    None if it is streamed.
    """

    train: Part | None
    eval: Part | None
    warnings: tuple[str, ...]
    eval_sets: dict[str, Part] = field(default_factory=dict)

    @property
    def formats(self) -> tuple[Format, ...]:
        """Formats of the documents, each once."""
        parts = [part for part in (self.train, self.eval, *self.eval_sets.values()) if part is not None]
        return tuple(dict.fromkeys(kind.format for part in parts for kind in part.kinds))


def load_documents(
    data: Data,
    facts: DatasetFacts,
    *,
    seed: int,
    cache_dir: Path,
    template: str | None = None,
    images: bool = False,
) -> Documents:
    """Load the training and validation documents, source by source and in file order.

    Each line of a .txt file is one document; blank lines are dropped in tokenisation. What is held out for validation is
    drawn before documents are repeated by the weight of their source, so that no copy of it is trained on.

    Args:
        data: The job's data section.
        facts: Result of `check_data`.
        seed: Seed of the documents that `validation_fraction` holds out, and of those of a weight's fraction.
        cache_dir: Folder in which `datasets` stores the Arrow files.
        template: Text of the chat template; message keys that it mentions are read.
        images: Whether columns of images are read.
    Returns:
        All data sets, in our own columns.
    Raises:
        DataError: DATA_HUB, DATA_REVISION, DATA_READ, DATA_JSON, DATA_COLUMNS, DATA_FORMAT, DATA_MIXED, DATA_TOO_SMALL.
    """
    warnings: list[str] = []
    load = partial(_load_part, data=data, cache_dir=cache_dir, template=template, images=images, warnings=warnings)
    named = dict(zip(data.eval_sets, facts.eval, strict=True)) if data.eval_sets else {}
    sets = {name: load((each,), part=f"eval.{name}") for name, each in named.items()}
    held = load(facts.eval, part="eval") if facts.eval and not sets else None
    if data.streaming:
        return Documents(train=None, eval=held, eval_sets=sets, warnings=tuple(warnings))
    train = load(facts.train, part="train")
    if data.max_samples is not None:
        train = train.select(np.arange(min(data.max_samples, len(train.documents))))
    if held is not None and data.sources is None and held.kinds[0].format != train.kinds[0].format:
        message = f"data.train is {train.kinds[0].format}, but data.eval is {held.kinds[0].format}"
        raise DataError.of(code="DATA_MIXED", key="data.eval", message=message, fix="Give both the same columns")
    rows = None
    if held is None and not sets and data.validation_fraction is not None:
        held_rows, rows = split_rows(len(train.documents), data.validation_fraction, seed=seed)
        held = train.select(held_rows)
    weights = [getattr(source, "weight", 1) for _, source in data.sources_of("train")]
    if any(weight != 1 for weight in weights):
        rows = np.arange(len(train.documents)) if rows is None else rows
        rows = weighted_rows(rows, train.origins, weights, seed=seed)
    train = train if rows is None else train.select(rows)
    return Documents(train=train, eval=held, eval_sets=sets, warnings=tuple(warnings))


def weighted_rows(rows: np.ndarray, origins: Origins, weights: Sequence[float], *, seed: int) -> np.ndarray:
    """Return the rows of one epoch: those of each source as often as its weight says, in file order.

    Args:
        rows: Rows to train on, in order.
        origins: Sources of all rows.
        weights: Weight of each source; of its fraction as many rows are drawn, rounded up.
        seed: Seed of what is drawn.
    """
    chosen: list[np.ndarray] = []
    bounds = np.cumsum([0, *origins.counts])
    for number, weight in enumerate(weights):
        mine = rows[(rows >= bounds[number]) & (rows < bounds[number + 1])]
        whole, rest = divmod(Fraction(str(weight)), 1)
        drawn = shuffled(len(mine), seed=seed, stream=_DRAWN + number)[: math.ceil(rest * len(mine))]
        chosen += [*[mine] * whole, mine[np.sort(drawn)]]
    return np.concatenate(chosen)


def split_rows(num_rows: int, fraction: float, *, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw the validation rows; both parts stay in file order.

    Returns:
        Row numbers of the validation part (the rounded fraction, at least one), and all others.
    Raises:
        DataError: DATA_TOO_SMALL, if there are fewer than two rows.
    """
    if num_rows < 2:
        message = f"data.validation_fraction={fraction} cannot split {num_rows} document: each part needs one"
        fix = "Give more documents, or remove data.validation_fraction"
        raise DataError.of(code="DATA_TOO_SMALL", key="data.validation_fraction", message=message, fix=fix)
    num_held = min(max(1, round(num_rows * fraction)), num_rows - 1)
    order = shuffled(num_rows, seed=seed, stream=0)
    return np.sort(order[:num_held]), np.sort(order[num_held:])


def shuffled(num_rows: int, *, seed: int, stream: int) -> np.ndarray:
    """Return a permutation of `range(num_rows)` that depends on its arguments alone.

    It sorts raw 64-bit words of PCG64: numpy keeps those stable across versions, which it does not guarantee
    for `Generator.permutation` (NEP 19).
    """
    keys = np.random.PCG64(np.random.SeedSequence([seed, stream])).random_raw(num_rows)
    return np.argsort(keys, kind="stable")


def _load_part(
    sources: tuple[SourceFacts, ...],
    *,
    data: Data,
    part: str,
    cache_dir: Path,
    template: str | None,
    images: bool,
    warnings: list[str],
) -> Part:
    loaded, kinds, counts, keys = [], [], [], []
    records: list[np.ndarray | None] = []
    entries = dict(data.sources_of("train" if part == "train" else "eval"))
    if part.startswith("eval."):  # one of the named sets
        entries = {f"data.{part}": entries[f"data.{part}"]}
    for facts, (key, source) in zip(sources, entries.items(), strict=True):
        documents = load_source(facts, source, key=key, cache_dir=cache_dir)
        if source.max_rows is not None:
            documents = documents.select(range(min(source.max_rows, len(documents))))
        rows = None
        if data.preprocess is not None:
            documents, rows = preprocessed(documents, data.preprocess, facts, key=key, cache_dir=cache_dir)
        names = renamed(documents.column_names, source.columns, key=key, name=facts.name)
        if isinstance(names, Problem):
            raise DataError(names)
        if source.columns:
            documents = documents.select_columns(list(names)).rename_columns(names)
        layout = resolve_layout(documents.column_names, source.format, key=key, name=facts.name)
        if isinstance(layout, Problem):
            raise DataError(layout)
        kinds.append(Kind(layout.format, data.loss_of(source)))
        if unread := _unread(documents, layout):
            warnings.append(unread_warning(facts.name, unread))
        warnings += _unread_keys(documents, layout, facts.name, template)
        counts.append(len(documents))
        records.append(rows)
        keys.append(key)
        others = _image_columns(documents) if images and layout.format == "messages" else {}
        if others:
            documents = documents.cast(datasets.Features({**documents.features, **others}))
        loaded.append(_in_own_columns(documents, layout, facts, key=key, cache_dir=cache_dir, others=tuple(others)))
    if data.sources is None and len({kind.format for kind in kinds}) > 1:
        listed = ", ".join(f"{facts.name} is {kind.format}" for facts, kind in zip(sources, kinds, strict=True))
        message = f"data.{part} has several formats: {listed}"
        fix = "Give all files of a job the same columns, or name them in data.sources, each with its format"
        raise DataError.of(code="DATA_MIXED", key=f"data.{part}", message=message, fix=fix)
    origins = Origins(sources=sources, keys=tuple(keys), counts=tuple(counts), records=tuple(records))
    differ = len(set(kinds)) > 1
    columns = {tuple(each.column_names) for each in loaded}
    if len(loaded) > 1 and (differ or kinds[0].format == "messages" or len(columns) > 1):
        numbers = range(len(loaded)) if differ else [None] * len(loaded)
        loaded = [_as_text(each, number, cache_dir=cache_dir) for each, number in zip(loaded, numbers, strict=True)]
    joined = loaded[0] if len(loaded) == 1 else datasets.concatenate_datasets(loaded)
    return Part(documents=joined, origins=origins, kinds=tuple(kinds) if differ else tuple(kinds[:1]))


def _unread(documents: Any, layout: Layout) -> list[str]:
    head = documents.select(range(min(PEEK_RECORDS, len(documents))))
    return [column for column in unread_columns(layout, tuple(documents.column_names)) if any(head[column])]


def _unread_keys(documents: Any, layout: Layout, name: str, template: str | None) -> list[str]:
    if layout.format != "messages" or layout is ALPACA_CHAT:
        return []
    head = documents.select(range(min(PEEK_RECORDS, len(documents))))
    warning = unread_key_warning(name, head[layout.needed[0]][:], template=template)
    return [] if warning is None else [warning]


def _image_columns(documents: Any) -> dict[str, Any]:
    """Return the columns of images, with features that leave images of `datasets` as path and bytes."""
    encoded = datasets.Image(decode=False)
    found = {name: documents.features[name] for name in IMAGE_COLUMNS if name in documents.column_names}
    for name, feature in found.items():
        if isinstance(feature, datasets.Image):
            found[name] = encoded
        elif isinstance(getattr(feature, "feature", None), datasets.Image):
            found[name] = datasets.List(encoded)
    return found


def _in_own_columns(
    documents: Any, layout: Layout, source: SourceFacts, *, key: str, cache_dir: Path, others: tuple[str, ...] = ()
) -> Any:
    """Keep the columns that are read, and `others`, or convert those of another layout to our own."""
    if layout.convert is None:
        return documents.select_columns(
            [column for column in (*layout.reads, *others) if column in documents.column_names]
        )
    convert, fault_of = layout.convert, layout.fault

    def converted(record: dict[str, Any], index: int) -> dict[str, Any]:
        if (fault := fault_of(record)) is not None:
            message, fix = f"{place_of(source, index)}: {fault}", "Correct or remove the record"
            raise DataError.of(code="DATA_TYPE", key=key, message=message, fix=fix)
        return {**convert(record), **{name: record[name] for name in others}}

    return _mapped(
        documents, converted, layout.name, layout.format, *others, desc=f"Reading {layout.name}", cache_dir=cache_dir
    )


def _as_text(documents: Any, number: int | None, *, cache_dir: Path) -> Any:
    """Convert records to one column of JSON, since their keys may differ between files, unlike those of a table.

    Args:
        documents: Records of one source.
        number: Index of the source for the column `SOURCE`; None without that column.
        cache_dir: Folder of the result.
    """

    def written(record: dict[str, Any], _: int) -> dict[str, Any]:
        text = {CONVERSATION: json.dumps(dict(record), ensure_ascii=False, default=_as_json)}
        return text if number is None else {**text, SOURCE: number}

    kind = ("conversations", "text" if number is None else f"source {number}")
    return _mapped(documents, written, *kind, desc="Joining sources", cache_dir=cache_dir)


def _as_json(value: Any) -> str:
    """Return what JSON lacks as text: the bytes of an image as a `data:` address."""
    return f"data:image;base64,{base64.b64encode(value).decode()}" if isinstance(value, bytes) else str(value)


def _mapped(documents: Any, function: Callable[..., Any], *kind: str, desc: str, cache_dir: Path) -> Any:
    """Map records to other columns, cached in a file that is named by a hash of the input and of `kind`."""
    parts = (str(_LAYOUT_VERSION), documents._fingerprint, *kind)
    fingerprint = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    cache_dir.mkdir(parents=True, exist_ok=True)
    return documents.map(
        function,
        with_indices=True,
        remove_columns=documents.column_names,
        cache_file_name=str(cache_dir / f"{kind[0]}-{fingerprint}.arrow"),
        new_fingerprint=fingerprint,  # else a hash of the function, which differs in each call
        desc=desc,
    )


def load_source(source: SourceFacts, wanted: EvalSource, *, key: str, cache_dir: Path, streaming: bool = False) -> Any:
    """Return a source as a `Dataset`, or if `streaming` as an `IterableDataset`, which reads no more than its head at once.

    Raises:
        DataError: DATA_HUB, DATA_REVISION, DATA_READ, DATA_JSON.
    """
    split = split_of(wanted, key)
    try:
        if source.kind == "hub":
            return _load_hub(wanted, key=key, split=split, streaming=streaming)
        if source.kind == "saved":
            saved = datasets.load_from_disk(str(source.path))
            documents = saved[split] if isinstance(saved, datasets.DatasetDict) else saved
            documents.data.table.validate(full=True)  # offsets of a damaged file may point anywhere
            # A set is saved with the format it had: as tensors, say, or without some of its columns.
            plain = documents.format["type"] is None and documents.format["columns"] == documents.column_names
            documents = documents if plain else documents.with_format(None)
            return documents.to_iterable_dataset() if streaming else documents
        options: dict[str, Any] = {"data_files": [str(source.path)], "split": "train", "cache_dir": str(cache_dir)}
        if source.kind == "csv":
            options |= _csv_options(source.columns)
        if source.kind == "txt":
            options["encoding"] = "utf-8-sig"  # a byte order mark is not part of the first document
        with wide_cells(), warnings.catch_warnings():
            # `_csv_options` returns both, and they agree.
            warnings.filterwarnings("ignore", "Both a converter and dtype were specified")
            return datasets.load_dataset(_BUILDERS[source.kind], **options, streaming=streaming)
    except DataError:
        raise
    except Exception as error:  # the libraries raise dozens of types here, all of which mean that it cannot be read
        raise DataError(load_problem(source, error, key=key)) from error


def _csv_options(columns: Sequence[str]) -> dict[str, Any]:
    """Return options with which pandas keeps every cell as text: by default it turns "12" into a number and "NA" into NaN.

    Its default parser shifts cells to other columns after a bare carriage return; its `python` engine uses the csv
    module, like `toolkit.dataset_inspection.files`.
    """
    return {
        "features": datasets.Features({column: datasets.Value("string") for column in columns}),
        "keep_default_na": False,
        "engine": "python",
        "converters": dict.fromkeys(columns, _as_it_stands),
    }


def _as_it_stands(cell: Any) -> Any:
    return cell


def _load_hub(source: EvalSource, *, key: str, split: str, streaming: bool) -> Any:
    """Load a hub data set, and check that it has the revision that the job names.

    Source:
        datasets load.py CachedDatasetModuleFactory: if the hub is out of reach, the revision that was cached last is used,
        with a warning in the log.
    """
    name, commit, setting = source.path, source.revision, setting_of(key, "revision")
    if commit is not None and not _COMMIT.fullmatch(commit):
        try:
            commit = HfApi().dataset_info(name, revision=commit).sha
        except RevisionNotFoundError:
            message, fix = f"{key}={name} has no revision {commit}", "Name a branch, tag or commit of it"
            raise DataError.of(code="DATA_REVISION", key=setting, message=message, fix=fix) from None
    documents = datasets.load_dataset(name, source.name, split=split, revision=commit, streaming=streaming)
    if streaming:
        return documents
    # The cache has one folder per commit (datasets builder.py _relative_data_dir).
    found = {Path(file["filename"]).parent.name for file in documents.cache_files}
    if commit is not None and found - {commit}:
        raise DataError.of(
            code="DATA_REVISION",
            key=setting,
            message=f"{key}={name} at revision={source.revision} is unreachable, and the cache has {', '.join(found)}",
            fix=f"Go online, or set {setting} to the commit that is cached",
            source="datasets.load_dataset",
        )
    return documents


def load_problem(source: SourceFacts, error: Exception, *, key: str) -> Problem:
    """Return the problem of a source that cannot be read: DATA_HUB, DATA_JSON or DATA_READ."""
    cause = error.__cause__ or error
    reason = " ".join(f"{type(cause).__name__}: {cause}".split())[:500]
    if source.kind == "hub":
        message = f"{key}={source.name} is not a local path, and as a hub data set it does not load: {reason}"
        fix = "Check the id, data.name, data.revision and data.split, log in for a gated set (hf auth login), or name local files"
        return Problem(code="DATA_HUB", key=key, message=message, fix=fix, source="datasets.load_dataset")
    if source.kind in ("jsonl", "json") and source.path is not None:
        bad = first_bad_json_line(source.path) if source.kind == "jsonl" else None
        if bad is not None:
            fix = 'Write one object per line, such as {"text": "..."}'
            return Problem(code="DATA_JSON", key=key, message=f"{source.path}: {bad}", fix=fix)
    message = f"{source.path} does not load: {reason}"
    saved, files = "Write it again with Dataset.save_to_disk", "Give every record the same columns, each of one type"
    fix = saved if source.kind == "saved" else files
    return Problem(code="DATA_READ", key=key, message=message, fix=fix, source="datasets.load_dataset")
