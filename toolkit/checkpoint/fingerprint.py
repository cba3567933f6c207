"""The documents that a run reads, and its tokenizer, identified by content: a file that has moved is the same, and one that has
changed is another.

Needs no torch: whether a checkpoint matches a job's data is checked before any process starts.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from toolkit.config.job import Job
from toolkit.config.user_code import code_files
from toolkit.errors import Problem

_OF_DATA = frozenset({"data.train", "data.sources", "data.eval", "data.chat_template", "data.preprocess"})
_TOKENIZER = "tokenizer"  # its files one by one; version 0.1.0 recorded one digest of those of `model.tokenizer` alone
_NAMED_TOKENIZER = "model.tokenizer"
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "chat_template.jinja"),
)
# In addition to those: other vocabularies (SentencePiece, tiktoken, Mistral's), named chat templates, code that a tokenizer brings.
_MORE_TOKENIZER_FILES = (
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "additional_chat_templates/*.jinja",
    "tokenization_*.py",
)


class Source(BaseModel):
    """Content of one source that a run reads; of one on the hub, only its name is known.

    Args:
        name: Name as in the job; for a tokenizer's file, its path in the tokenizer's folder.
        num_bytes: Size, bytes.
        modified_ns: Time of its last change.
        sha256: SHA-256 of its content, in hexadecimal.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    name: Annotated[str, Field(max_length=4096)]
    num_bytes: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    modified_ns: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None

    @property
    def content(self) -> str:
        """Identifier of the content: for a source on the hub, its name."""
        return self.sha256 or self.name


# What a run reads, by the key of the job that names it, in order; `tokenizer` for the files of its tokenizer.
Sources = Mapping[str, Sequence[Source]]


def identify(job: Job, *, known: Sources | None = None) -> dict[str, tuple[Source, ...]]:
    """Return the content of a job's data files, of its chat template and of its tokenizer.

    Args:
        job: Job, whose relative paths start from the working directory.
        known: Earlier result: a file of the same name, size and time of change is not read again.
    """
    before = known or {}
    found = {
        key: tuple(_source(name, _files(name, key), before.get(key, ())) for name in names)
        for key, names in _names(job).items()
    }
    folder = _tokenizer_folder(job)
    files = {} if folder is None else {path.relative_to(folder).as_posix(): path for path in _tokenizer_files(folder)}
    found[_TOKENIZER] = tuple(_source(name, [path], before.get(_TOKENIZER, ())) for name, path in files.items())
    return found


def source_problems(job: Job, saved: Job, recorded: Sources, folder: Path) -> Iterator[Problem]:
    """Yield which sources of a job differ from those that a checkpoint's run has read.

    Args:
        job: Job that resumes.
        saved: Job of the checkpoint.
        recorded: Result of `identify` at the time of saving; empty in checkpoints of the earliest versions, whose names are compared.
        folder: Checkpoint folder.
    """
    now, names, former = identify(job, known=recorded), _names(job), _names(saved)
    unasked = _OF_DATA if job.data is None or saved.data is None else frozenset()  # the user's own script
    for key in sorted({*names, *former} - unasked):
        before, after = former.get(key, ()), names.get(key, ())
        is_same = before == after if key not in recorded else _contents(recorded[key]) == _contents(now.get(key, ()))
        if not is_same:
            yield _other_source(key, before, after, folder)
    yield from _tokenizer_problems(job, saved, recorded, now[_TOKENIZER], folder)


def _tokenizer_problems(
    job: Job, saved: Job, recorded: Sources, now: Sequence[Source], folder: Path
) -> Iterator[Problem]:
    before, after = ((model.tokenizer,) if model.tokenizer else () for model in (saved.model, job.model))
    if now and recorded.get(_TOKENIZER):
        from_hub = _is_hub(_tokenizer_name(job)) or _is_hub(_tokenizer_name(saved))
        changed = _changed_files(recorded[_TOKENIZER], now, partial=from_hub)
        if changed:
            what = f"the tokenizer of {_tokenizer_name(job)} has changed since {folder} was saved: {', '.join(changed)}"
            yield _other_data(_NAMED_TOKENIZER, what, f"Restore the tokenizer with which {folder} was trained", folder)
    elif _NAMED_TOKENIZER in recorded:
        if _contents(recorded[_NAMED_TOKENIZER]) != [_digest_of_0_1_0(name) for name in after]:
            yield _other_source(_NAMED_TOKENIZER, before, after, folder)
    elif before != after:
        yield _other_source(_NAMED_TOKENIZER, before, after, folder)


def source_notes(recorded: Sources) -> tuple[str, ...]:
    """Return what cannot be compared, because the checkpoint's version did not record it."""
    if _TOKENIZER in recorded or _NAMED_TOKENIZER in recorded:
        return ()
    return (
        "the checkpoint does not record its tokenizer, since an earlier version wrote it: the tokenizer is not "
        "compared",
    )


def _other_source(key: str, before: Sequence[str], after: Sequence[str], folder: Path) -> Problem:
    shown, then = ", ".join(after) or "None", ", ".join(before) or "None"
    if after != before:
        return _other_data(key, f"{key}={shown}, but {folder} was saved with {then}", f"Set {key} to {then}", folder)
    what = f"{key}={shown}, but its content has changed since {folder} was saved"
    return _other_data(key, what, f"Restore the earlier content of {shown}", folder)


def _contents(sources: Sequence[Source]) -> list[str]:
    return [source.content for source in sources]


def _other_data(key: str, what: str, put_back: str, folder: Path) -> Problem:
    return Problem(
        code="CHECKPOINT_DATA",
        key=key,
        message=f"{what}: its position in the data would refer to other documents",
        fix=f"{put_back} to resume, or export it (`toolkit export {folder}`) and warm-start from the export",
    )


def _changed_files(before: Sequence[Source], after: Sequence[Source], *, partial: bool) -> list[str]:
    """Return the names of the tokenizer files that differ.

    Args:
        before: Files at the time of saving.
        after: Files now.
        partial: Whether one side is the hub's cache, which may be incomplete: only files on both sides can differ.
    """
    then, now = ({source.name: source.content for source in sources} for sources in (before, after))
    compared = then.keys() & now.keys() if partial else then.keys() | now.keys()
    return sorted(name for name in compared if then.get(name) != now.get(name))


def _names(job: Job) -> dict[str, tuple[str, ...]]:
    """Return the sources that a job's data section names, by key."""
    named = {} if job.data is None else {key: getattr(job.data, key.removeprefix("data.")) for key in sorted(_OF_DATA)}
    if job.data is not None and job.data.eval_sets:
        named["data.eval"] = tuple(source.path for _, source in sorted(job.data.eval_sets.items()))
    if job.data is not None and job.data.sources is not None:
        named["data.sources"] = tuple(source.path for source in job.data.sources)
    return {key: (value,) if isinstance(value, str) else value for key, value in named.items() if value is not None}


def _local(name: str) -> Path:
    return Path(os.path.realpath(os.path.expanduser(name)))  # noqa: PTH111 - Path.expanduser raises for an unknown user


def _files(name: str, key: str = "") -> list[Path]:
    """Return the files of a data source, or of a function's module and those beside it that it imports, in a fixed order; empty for a source on the hub."""
    if key == "data.preprocess":
        return code_files(name)
    path = _local(name)
    if path.is_file():
        return [path]
    return sorted(found for found in path.rglob("*") if found.is_file()) if path.is_dir() else []


def _tokenizer_name(job: Job) -> str:
    return job.model.tokenizer or job.model.name


def _is_hub(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not _local(name).is_dir()


def _tokenizer_folder(job: Job) -> Path | None:
    """Return the folder of a job's tokenizer: its own, or the hub's cache; None if it is not cached."""
    name = _tokenizer_name(job)
    if _local(name).is_dir():
        return _local(name)
    if not _is_hub(name):
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    revision = job.model.revision if job.model.tokenizer is None else None
    for file in _TOKENIZER_FILES:
        try:
            cached = try_to_load_from_cache(name, file, revision=revision)
        except HFValidationError:
            return None
        if isinstance(cached, str):
            return Path(cached).parent
    return None


def _tokenizer_files(folder: Path) -> list[Path]:
    """Return the tokenizer's files in a folder that may also contain the model's."""
    found = {
        path for name in (*_TOKENIZER_FILES, *_MORE_TOKENIZER_FILES) for path in folder.glob(name) if path.is_file()
    }
    return sorted(found)


def _digest_of_0_1_0(name: str) -> str:
    files = [path for path in _files(name) if path.name in _TOKENIZER_FILES or path == _local(name)]
    return _digest(files) if files else name


def _source(name: str, files: list[Path], known: Sequence[Source]) -> Source:
    if not files:
        return Source(name=name)
    stats = [path.stat() for path in files]
    size, modified = sum(stat.st_size for stat in stats), max(stat.st_mtime_ns for stat in stats)
    for earlier in known:
        if (earlier.name, earlier.num_bytes, earlier.modified_ns) == (name, size, modified):
            return earlier
    return Source(name=name, num_bytes=size, modified_ns=modified, sha256=_digest(files))


def _digest(files: list[Path]) -> str:
    whole = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()
