"""Inspection of a job's data, and every mistake that shows without loading it: no torch, no `datasets`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from toolkit.config.job import Data, EvalSource, LossOn, Part
from toolkit.config.paths import PathKind, is_file, is_folder, num_bytes, path_kind, shown
from toolkit.config.suggestions import nearest
from toolkit.dataset_inspection.chat_template import (
    CHATML,
    ChatTemplate,
    read_chat_template,
    template_problems,
    unused_chat_template,
)
from toolkit.dataset_inspection.chats import conversation_problems, conversations, unread_key_warning
from toolkit.dataset_inspection.columns import renamed, resolve_layout
from toolkit.dataset_inspection.files import SUFFIXES, Head, Kind, read_head
from toolkit.dataset_inspection.formats import (
    LABEL_FORMATS,
    Format,
    as_format,
    has_settings,
    loss_on_problem,
    section_problems,
    split_of,
)
from toolkit.dataset_inspection.image_sources import absent_images
from toolkit.dataset_inspection.labels import Labels, label_problems
from toolkit.dataset_inspection.layouts import Layout, unread_columns
from toolkit.dataset_inspection.user_function import head_of
from toolkit.errors import DataError, Problem, SpecError, ToolkitError, raise_all

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_FILE_SUFFIXES = {".tsv", ".gz", ".zst", ".zip", ".tar", ".jsonlines", ".ndjson", ".arrow", ".md", ".yaml", ".xlsx"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFacts:
    """Facts about one entry of `data.train`, `data.sources` or `data.eval`.

    Args:
        name: Name as written in the job.
        kind: Suffix family of a file, `saved` (a folder of `datasets`), or `hub`.
        path: Local path; None for the hub.
        columns: Names of its columns; empty for the hub.
        format: Format of its records; None if only loading it can tell.
        num_bytes: Size on disk, bytes; None for the hub.
        unread: Columns that are not empty, belong to the documents by their names, and are not read.
        unread_keys: Warning of the keys of its messages that are not read; None without any.
        key: Key path that names it.
        loss_on: Tokens of it that count in the loss.
    """

    name: str
    kind: Kind
    path: Path | None
    columns: tuple[str, ...]
    format: Format | None
    num_bytes: int | None
    unread: tuple[str, ...] = ()
    unread_keys: str | None = None
    key: str = "data"
    loss_on: LossOn = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetFacts:
    """Facts about all sources of a job's data, and their common format (None if they differ, or only loading can tell)."""

    train: tuple[SourceFacts, ...]
    eval: tuple[SourceFacts, ...]
    format: Format | None

    @property
    def formats(self) -> tuple[Format, ...]:
        """Known formats of the sources, in order of first appearance."""
        return tuple(dict.fromkeys(each.format for each in self.train + self.eval if each.format is not None))

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the training sources, in order of first appearance."""
        return tuple(dict.fromkeys(column for source in self.train for column in source.columns))

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings of what training would ignore: one for the columns and one for the message keys of each source."""
        sources = self.train + self.eval
        columns = [unread_warning(source.name, source.unread) for source in sources if source.unread]
        return (*columns, *(source.unread_keys for source in sources if source.unread_keys is not None))

    @property
    def num_bytes(self) -> int | None:
        """Size of the local training sources on disk, bytes; None if one is on the hub."""
        sizes = [source.num_bytes for source in self.train]
        return None if None in sizes else sum(size for size in sizes if size is not None)


def unread_warning(name: str, columns: Sequence[str]) -> str:
    """Return the warning that columns with context are not read, and what to do."""
    them, is_ = ("it", "is") if len(columns) == 1 else ("them", "are")
    return (
        f"{name}: the column{'s' * (len(columns) > 1)} {', '.join(columns)} {is_} not used: move {them} into the "
        f"columns that are, or remove {them}"
    )


def peek(
    data: Data,
    *,
    base: Path | None = None,
    template: ChatTemplate | None = None,
    runs_code: bool = False,
    labels: Labels | None = None,
    images: bool = False,
) -> tuple[DatasetFacts, tuple[Problem, ...]]:
    """Inspect the head of every source (1000 records per file), without stopping at the first fault.

    Args:
        data: The job's data section.
        base: Folder that relative paths start from; the working directory if None.
        template: Chat template of the tokenizer, if available; `data.chat_template` takes precedence.
        runs_code: Whether to run `data.preprocess` on a record of each source, without which the format is not known.
        labels: Labels that the records must have; those of other formats are not looked at.
        images: Whether to look for the files of the images that messages name.
    Returns:
        The facts that could be read, and the problems: DATA_NOT_FOUND, DATA_SUFFIX, DATA_EMPTY, DATA_JSON,
        DATA_SOURCES, PATH_UNREADABLE, DATA_ENCODING, DATA_READ, DATA_COLUMNS, DATA_FORMAT, DATA_TYPE, DATA_MIXED, DATA_LOSS_ON, DATA_SPLIT,
        DATA_LABELS, DATA_REVISION, DATA_VALIDATION, DATA_CHAT_TEMPLATE_FILE, DATA_CHAT_TEMPLATE_UNUSED, DATA_CHAT_TEMPLATE,
        DATA_CHAT_DROPPED, DATA_IMAGE.
    """
    problems = section_problems(data)
    root = base or Path.cwd()
    template, unreadable = _template(data, root, template)
    sources: dict[str, list[SourceFacts]] = {"train": [], "eval": []}
    for part in get_args(Part):
        for key, source in data.sources_of(part):
            facts = _look_at(
                source,
                data,
                key=key,
                root=root,
                template=template,
                problems=problems,
                runs_code=runs_code,
                labels=labels,
                images=images,
            )
            if facts is not None:
                sources[part].append(facts)
    everything = sources["train"] + sources["eval"]
    formats = {source.format for source in everything if source.format is not None}
    alike = sources["train"] if data.eval_sets else everything  # named sets have formats of their own
    mixed = data.sources is None and len({source.format for source in alike} - {None}) > 1
    if mixed:
        problems.append(_mixed(alike))
    found = next(iter(formats)) if len(formats) == 1 else None
    if data.sources is not None or (formats and not mixed):
        problems += _loss_problems(data, everything)
    problems += _combination_problems(data, sources)
    problems += unreadable
    return DatasetFacts(train=tuple(sources["train"]), eval=tuple(sources["eval"]), format=found), tuple(problems)


def check_data(data: Data, *, base: Path | None = None, labels: Labels | None = None) -> DatasetFacts:
    """Return the facts of `peek`, or raise DataError with all its problems."""
    facts, problems = peek(data, base=base, labels=labels)
    raise_all(DataError, problems)
    return facts


def _loss_problems(data: Data, sources: list[SourceFacts]) -> list[Problem]:
    """Return the problems of sources without tokens to learn, and of a chat template that none of them needs."""
    found: dict[str, Problem] = {}
    for source in sources:
        key = f"{source.key}.loss_on" if _own_loss(data, source) else "data.loss_on"
        if source.format is not None and (problem := loss_on_problem(source.loss_on, source.format, key=key)):
            found.setdefault(key, problem)
    formats = [source.format for source in sources]
    unused = [] if "messages" in formats else unused_chat_template(data, next(filter(None, formats), None))
    return [*found.values(), *([] if None in formats else unused)]


def _own_loss(data: Data, facts: SourceFacts) -> bool:
    return any(
        key == facts.key and source.loss_on is not None
        for part in get_args(Part)
        for key, source in data.sources_of(part)
    )


def _look_at(
    source: EvalSource,
    data: Data,
    *,
    key: str,
    root: Path,
    template: ChatTemplate | None,
    problems: list[Problem],
    runs_code: bool,
    labels: Labels | None,
    images: bool,
) -> SourceFacts | None:
    name, loss_on = source.path, data.loss_of(source)
    path = root / name
    try:
        found = path_kind(path, key=key)
        path = Path(os.path.realpath(path))  # Path.resolve raises for circular links before Python 3.13
        if found == "absent":
            if is_hub_id(name):
                hub = SourceFacts(name=name, kind="hub", path=None, columns=(), format=_wanted(source), num_bytes=None)
                return replace(hub, key=key, loss_on=loss_on)
            problems.append(_not_found(name, path, key=key))
            return None
        kind = _local_kind(path, found, key=key)
        if kind is None:
            problems.append(_odd_kind(name, path, found, key=key))
            return None
        size = num_bytes(path, key=key)
    except SpecError as error:
        problems += error.problems
        return None
    if has_settings(key):
        problems += _local_problems(source, kind, key=key)
    head = read_head(path, kind, key=key, split=split_of(source, key))
    facts = SourceFacts(
        name=name,
        kind=kind,
        path=path,
        columns=head.columns,
        format=_wanted(source),
        num_bytes=size,
        key=key,
        loss_on=loss_on,
    )
    if data.preprocess is not None:
        try:
            made = head_of(head, data.preprocess, source=name) if runs_code else None
        except ToolkitError as error:
            problems += error.problems
            made = None
        if made is None:
            problems += head.problems
            return facts
        head = made
    return _facts_of(
        source,
        head,
        facts,
        data.system_prompt,
        template=template,
        problems=problems,
        labels=labels,
        folder=folder_of(path) if images else None,
    )


def folder_of(path: Path | None) -> Path:
    """Return the folder from which paths in a source at `path` start: that of its file, or for one of the hub the working directory."""
    return Path() if path is None else path.parent if path.is_file() else path


def _local_problems(source: EvalSource, kind: Kind, *, key: str) -> Iterable[Problem]:
    """Yield the problems of keys of the hub that a local source has."""
    for name, code in (("name", "DATA_SPLIT"), ("revision", "DATA_REVISION"), ("split", "DATA_SPLIT")):
        value = getattr(source, name)
        if value is not None and not (name == "split" and kind == "saved"):
            message = f"{key}.{name}={value} is not used: it belongs to a hub data set, and {source.path} is local"
            yield Problem(code=code, key=f"{key}.{name}", message=message, fix=f"Remove {name}")


def _facts_of(
    source: EvalSource,
    head: Head,
    facts: SourceFacts,
    system_prompt: str | None,
    *,
    template: ChatTemplate | None,
    problems: list[Problem],
    labels: Labels | None,
    folder: Path | None,
) -> SourceFacts:
    name, key = facts.name, facts.key
    problems += head.problems
    if not head.columns:
        return facts
    names = renamed(head.columns, source.columns, key=key, name=name)
    if isinstance(names, Problem):
        problems.append(names)
        return replace(facts, format=None)
    if source.columns:
        rows = (
            (line, {names[column]: value for column, value in row.items() if column in names})
            for line, row in head.records
        )
        head = replace(head, columns=tuple(names.values()), records=tuple(rows))
        facts = replace(facts, columns=head.columns)
    layout = resolve_layout(head.columns, source.format, key=key, name=name)
    if isinstance(layout, Problem):
        problems.append(layout)
        return replace(facts, format=None)
    problems += _type_problems(head.records, layout, key=key, name=name)
    problems += _blank_problems(head.records, layout.format, key=key, name=name)
    if labels is not None and layout.format in LABEL_FORMATS:
        sound = [(line, record) for line, record in head.records if layout.fault(record) is None]
        own = [(line, record if layout.convert is None else layout.convert(record)) for line, record in sound]
        problems += label_problems(own, labels, key=key, name=name)
    unread_keys = None
    if layout.format == "messages":
        problems += conversation_problems(
            head.records, layout, facts.loss_on, template, key=key, name=name, system_prompt=system_prompt
        )
        if folder is not None:
            problems += absent_images(conversations(head.records, layout), folder=folder, key=key, name=name)
        said = [record.get(layout.needed[0]) for _, record in head.records]
        unread_keys = unread_key_warning(name, said, template=None if template is None else template.text)
    return replace(facts, format=layout.format, unread=_unread(layout, head), unread_keys=unread_keys)


def _wanted(source: EvalSource) -> Format | None:
    return None if source.format == "auto" else as_format(source.format)


def _not_found(name: str, path: Path, *, key: str) -> Problem:
    near = nearest(path.name, (entry.name for entry in path.parent.glob("*")))
    fix = f"Did you mean {path.with_name(near[0])}" if near else "Name an existing file, or a hub id such as org/name"
    where = "" if is_folder(path.parent, key=key) else f": the folder {shown(path.parent)} does not exist either"
    message = f"{key}={shown(name)} is not found at {shown(path)}{where}"
    return Problem(code="DATA_NOT_FOUND", key=key, message=message, fix=fix)


def is_hub_id(name: str) -> bool:
    """Return whether a name that is not a local path reads as `org/name` or a bare name on the hub."""
    suffix = Path(name).suffix.lower()
    return _HUB_ID.fullmatch(name) is not None and suffix not in SUFFIXES and suffix not in _FILE_SUFFIXES


def _local_kind(path: Path, found: PathKind, *, key: str) -> Kind | None:
    if found == "folder":
        saved = any(is_file(path / name, key=key) for name in ("state.json", "dataset_dict.json"))
        return "saved" if saved else None
    return SUFFIXES.get(path.suffix.lower()) if found == "file" else None  # opening a pipe would block


def _odd_kind(name: str, path: Path, found: PathKind, *, key: str) -> Problem:
    what = "a pipe or a device" if found == "other" else f"suffix={path.suffix or 'none'}"
    if found == "folder":
        what = "a folder without state.json or dataset_dict.json"
    return Problem(
        code="DATA_SUFFIX",
        key=key,
        message=f"{key}={name} is not a supported kind of file: {what}",
        fix=f"Name a file ending in {', '.join(SUFFIXES)}, or a folder written by Dataset.save_to_disk",
    )


def _type_problems(
    records: Iterable[tuple[int, dict[str, Any]]], layout: Layout, *, key: str, name: str
) -> list[Problem]:
    faults = [(number, fault) for number, record in records if (fault := layout.fault(record))]
    if not faults:
        return []
    more = f" (and {len(faults) - 1} more records)" if len(faults) > 1 else ""
    shapes = {
        "text": 'Make text a string: {"text": "..."}',
        "prompt_completion": 'Make both strings: {"prompt": "...", "completion": "..."}',
        "messages": 'Write {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}',
        "tokens": 'Write {"input_ids": [1, 2, 3]}, and labels of the same length with -100 where nothing is learned',
        "alpaca": 'Make them strings: {"instruction": "...", "input": "", "output": "..."}',
        "text_label": 'Write {"text": "...", "label": "..."}, with text_pair where there are two texts',
        "tokens_tags": 'Write {"tokens": ["...", "..."], "tags": ["...", "..."]}, a tag for each token',
        "sharegpt": 'Write {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}',
    }
    message = f"{name}, record at line {faults[0][0]}: {faults[0][1]}{more}"
    return [Problem(code="DATA_TYPE", key=key, message=message, fix=shapes[layout.name])]


def _blank_problems(
    records: Sequence[tuple[int, dict[str, Any]]], format_: Format, *, key: str, name: str
) -> list[Problem]:
    texts = [record.get("text") for _, record in records]
    if format_ != "text" or not texts or any(not isinstance(text, str) or text.strip() for text in texts):
        return []
    message = f"{name}: text is blank in all of the first {len(texts)} records"
    return [Problem(code="DATA_EMPTY", key=key, message=message, fix="Name files with documents")]


def _unread(layout: Layout, head: Head) -> tuple[str, ...]:
    return tuple(
        column
        for column in unread_columns(layout, head.columns)
        if any(record.get(column) for _, record in head.records)
    )


def _mixed(sources: list[SourceFacts]) -> Problem:
    listed = ", ".join(f"{source.name} is {source.format}" for source in sources if source.format is not None)
    message = f"data has several formats: {listed}"
    return Problem(code="DATA_MIXED", key="data", message=message, fix="Give all files of a job the same columns")


def _combination_problems(data: Data, sources: dict[str, list[SourceFacts]]) -> list[Problem]:
    """Return the problems of keys that contradict each other: none may be accepted and then not used."""
    problems: list[Problem] = []
    # A source that is a section has its own split, name and revision: those of `data` are of the others.
    sources = {part: [each for each in found if not has_settings(each.key)] for part, found in sources.items()}
    if data.eval is not None and data.validation_fraction is not None:
        message = (
            f"data.validation_fraction={data.validation_fraction} conflicts with data.eval: both name validation data"
        )
        fix = "Remove one of the two"
        problems.append(Problem(code="DATA_VALIDATION", key="data.validation_fraction", message=message, fix=fix))
    if data.max_samples == 1 and data.validation_fraction is not None:
        message = (
            f"data.max_samples=1 leaves nothing to train on with data.validation_fraction={data.validation_fraction}"
        )
        fix = "Set data.max_samples to at least 2, or remove data.validation_fraction"
        problems.append(Problem(code="DATA_TOO_SMALL", key="data.max_samples", message=message, fix=fix))
    if data.eval_split is not None and (data.eval is None or data.eval_sets):
        why = "each set of data.eval has its own split" if data.eval_sets else "data.eval is not given"
        message = f"data.eval_split={data.eval_split} is not used: {why}"
        fix = "Set data.eval to the data set with that split, or remove data.eval_split"
        problems.append(Problem(code="DATA_SPLIT", key="data.eval_split", message=message, fix=fix))
    kinds = {part: {source.kind for source in found} for part, found in sources.items()}
    everything = kinds["train"] | kinds["eval"]
    if data.name is not None and everything and "hub" not in everything:
        message = f"data.name={data.name} is not used: it is a configuration of a hub data set, and all data is local"
        problems.append(Problem(code="DATA_SPLIT", key="data.name", message=message, fix="Remove data.name"))
    problems += _revision_problems(data, [source for found in sources.values() for source in found])
    unsplit = {part for part, found in kinds.items() if found and not found & {"hub", "saved"}}
    for part, key, split, default in (
        ("train", "data.split", data.split, "train"),
        ("eval", "data.eval_split", data.eval_split, None),
    ):
        if part in unsplit and split != default:
            message = f"{key}={split} is not used: local files have no splits"
            problems.append(Problem(code="DATA_SPLIT", key=key, message=message, fix=f"Remove {key}"))
    return problems


def _template(data: Data, root: Path, own: ChatTemplate | None) -> tuple[ChatTemplate | None, tuple[Problem, ...]]:
    """Return the template that renders messages, if available, and the problems of the job's own template."""
    name = data.chat_template
    if name is None:
        return own, ()
    try:
        text = read_chat_template(name, base=root)
        problems = () if name == CHATML else tuple(template_problems(name, text))
    except ToolkitError as error:
        return None, error.problems
    own = own or ChatTemplate("")
    return None if problems else replace(own, text=text), problems


def _revision_problems(data: Data, sources: list[SourceFacts]) -> list[Problem]:
    """Return the problems of a revision: it applies to one hub repository, not to local files or two repositories."""
    if data.revision is None or not sources:
        return []
    said, ids = f"data.revision={data.revision}", sorted({source.name for source in sources if source.kind == "hub"})
    local = [source.name for source in sources if source.kind != "hub"]
    if local:
        message, fix = f"{said} belongs to a hub data set, and {', '.join(local)} is local", "Remove data.revision"
    elif len(ids) > 1:
        message = f"{said} belongs to one hub data set, and the job names {len(ids)}: {', '.join(ids)}"
        fix = "Name one data set, or remove data.revision"
    else:
        return []
    return [Problem(code="DATA_REVISION", key="data.revision", message=message, fix=fix)]
