"""Which documents a run reads, by content: a file that has moved is the same, one that has changed is another.

Needs no torch: whether a checkpoint is of a job's data is said before any process starts.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from toolkit.errors import Problem
from toolkit.spec.job import Job

# Key of the job to its sources in order, as JSON: name, num_bytes, modified_ns, sha256; the last three are None on the hub.
Sources = Mapping[str, list[dict[str, Any]]]

_OF_DATA = frozenset({"data.train", "data.eval", "data.chat_template"})
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "chat_template.jinja"),
)


def identify(job: Job, *, known: Sources | None = None) -> dict[str, list[dict[str, Any]]]:
    """Gives the content of a job's data files, and of the tokenizer and the chat template that it names.

    Args:
        job: Its relative paths start from the working directory.
        known: An earlier answer: a file of the same name, size and time of change is not read again.
    """
    seen = {entry["name"]: entry for entries in (known or {}).values() for entry in entries}
    return {key: [_entry(name, _files(name, key), seen) for name in names] for key, names in _names(job).items()}


def source_problems(job: Job, saved: Job, recorded: Sources, folder: Path) -> Iterator[Problem]:
    """Says which sources of a job are not those that a checkpoint's run has read.

    Args:
        job: What is to go on.
        saved: What the checkpoint is of.
        recorded: What `identify` gave then; empty in checkpoints of earlier versions, whose names are compared.
        folder: The checkpoint.
    """
    now, names, former = identify(job, known=recorded), _names(job), _names(saved)
    unasked = _OF_DATA if job.data is None or saved.data is None else frozenset()  # a script of one's own
    for key in sorted({*names, *former} - unasked):
        before, after = former.get(key, ()), names.get(key, ())
        if key not in recorded:
            is_same = before == after
        else:
            is_same = [_content(entry) for entry in recorded[key]] == [_content(entry) for entry in now.get(key, [])]
        if is_same:
            continue
        shown, then = ", ".join(after) or "None", ", ".join(before) or "None"
        what = (
            f"{folder} was saved with {then}"
            if after != before
            else f"its content has changed since {folder} was saved"
        )
        yield Problem(
            code="CHECKPOINT_DATA",
            key=key,
            message=f"{key}={shown}, but {what}: its position would mean other documents",
            fix=f"{f'Set {key} to {then}' if after != before else f'Put back what {shown} was'} to resume, or export it "
            f"(`toolkit export {folder}`) and warm-start from the export",
        )


def _names(job: Job) -> dict[str, tuple[str, ...]]:
    named: dict[str, str | tuple[str, ...] | None] = {"model.tokenizer": job.model.tokenizer}
    if job.data is not None:
        named |= {key: getattr(job.data, key.removeprefix("data.")) for key in sorted(_OF_DATA)}
    return {key: (value,) if isinstance(value, str) else value for key, value in named.items() if value is not None}


def _files(name: str, key: str) -> list[Path]:
    """Gives the files of a source in a fixed order; none for one on the hub."""
    path = Path(os.path.realpath(os.path.expanduser(name)))  # noqa: PTH111 - Path.expanduser raises for an unknown user
    if path.is_file():
        return [path]
    found = sorted(found for found in path.rglob("*") if found.is_file()) if path.is_dir() else []
    # A tokenizer may lie in the folder of its model, whose weights do not concern it.
    return [file for file in found if file.name in _TOKENIZER_FILES] if key == "model.tokenizer" else found


def _entry(name: str, files: list[Path], seen: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    if not files:
        return {"name": name, "num_bytes": None, "modified_ns": None, "sha256": None}
    stats = [path.stat() for path in files]
    size, modified = sum(stat.st_size for stat in stats), max(stat.st_mtime_ns for stat in stats)
    known = seen.get(name)
    if known is not None and (known["num_bytes"], known["modified_ns"]) == (size, modified):
        return known
    return {"name": name, "num_bytes": size, "modified_ns": modified, "sha256": _digest(files)}


def _digest(files: list[Path]) -> str:
    whole = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()


def _content(entry: Mapping[str, Any]) -> str:
    """Gives what stands for the content: of a source on the hub, its name."""
    return str(entry["sha256"] or entry["name"])
