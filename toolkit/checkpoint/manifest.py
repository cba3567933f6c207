"""The manifest of a checkpoint: what must be there, byte for byte."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from toolkit.checkpoint.layout import LATEST, MANIFEST, write_json
from toolkit.errors import CheckpointError, Problem, raise_all
from toolkit.units import format_bytes

T = TypeVar("T")

_CHUNK_BYTES = 8 * 2**20

# hashlib lets other threads run while it hashes a chunk. One core hashes 0.5 to 2 GB/s, a local NVMe reads 3 to 7: four
# saturate it, and all ranks of a node hash at once.
_MAX_THREADS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A file's size in bytes and its SHA-256, in hexadecimal."""

    num_bytes: int
    sha256: str


def list_files(folder: Path) -> tuple[str, ...]:
    """Gives every file of a checkpoint but the manifest, relative, sorted."""
    found = (path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    return tuple(sorted(path.relative_to(folder).as_posix() for path in found))


def hash_files(folder: Path, names: Iterable[str], *, sync: bool = False) -> dict[str, Entry]:
    """Gives the entries of some files, read by a few threads; `sync` also forces each to disk."""
    listed = tuple(names)
    return dict(zip(listed, _in_threads(lambda name: _entry(folder / name, sync=sync), listed), strict=True))


def share(names: Iterable[str], *, rank: int, world_size: int) -> tuple[str, ...]:
    """Gives a rank's part of the files, so that all ranks hash at once."""
    return tuple(name for index, name in enumerate(names) if index % world_size == rank)


def write_manifest(folder: Path, entries: Mapping[str, Entry]) -> None:
    """Writes the manifest, last of all files."""
    files = {name: {"bytes": entry.num_bytes, "sha256": entry.sha256} for name, entry in sorted(entries.items())}
    write_json(folder / MANIFEST, {"format": 1, "files": files})


def read_manifest(folder: Path) -> dict[str, Entry]:
    """Reads the manifest.

    Raises:
        CheckpointError: CHECKPOINT_NOT_FOUND, CHECKPOINT_WEIGHTS_ONLY, CHECKPOINT_NO_LATEST, CHECKPOINT_FOREIGN,
            CHECKPOINT_INCOMPLETE or CHECKPOINT_DAMAGED, each with what can be done.
    """
    try:
        text = (folder / MANIFEST).read_text(encoding="utf-8")
    except OSError:
        raise CheckpointError(_without_manifest(folder)) from None
    try:
        files = json.loads(text)["files"]
        return {name: Entry(num_bytes=int(item["bytes"]), sha256=item["sha256"]) for name, item in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError.of(
            code="CHECKPOINT_DAMAGED",
            key=str(folder),
            message=f"{folder / MANIFEST} is not a manifest: {error}",
            fix="Resume from another checkpoint",
        ) from None


def size_problems(folder: Path, manifest: Mapping[str, Entry]) -> list[Problem]:
    """Compares presence and sizes, without reading contents."""
    problems = []
    for name, entry in manifest.items():
        try:
            found = (folder / name).stat().st_size
        except OSError:
            problems.append(_damaged(folder, name, "is missing"))
            continue
        if found != entry.num_bytes:
            problems.append(_damaged(folder, name, f"has {found} bytes, the manifest says {entry.num_bytes}"))
    return problems


def checksum_problems(folder: Path, manifest: Mapping[str, Entry], names: Iterable[str]) -> list[Problem]:
    """Compares the contents of some files."""

    def check(name: str) -> Problem | None:
        try:
            entry = _entry(folder / name)
        except OSError as error:
            return _damaged(folder, name, f"cannot be read: {error}")
        if entry.sha256 != manifest[name].sha256:
            return _damaged(folder, name, "has another SHA-256 than when it was written")
        return None

    return [problem for problem in _in_threads(check, tuple(names)) if problem is not None]


def verify(folder: Path, *, unread: Callable[[str], bool] | None = None) -> dict[str, Entry]:
    """Checks a checkpoint in one process.

    Args:
        folder: The checkpoint.
        unread: Says of a file's name that its contents will not be used: presence and size are all that is checked.

    Returns:
        The manifest.

    Raises:
        CheckpointError: With every file that is missing, cut short or changed.
    """
    manifest = read_manifest(folder)
    read = [name for name in manifest if unread is None or not unread(name)]
    raise_all(CheckpointError, size_problems(folder, manifest) or checksum_problems(folder, manifest, read))
    return manifest


def _in_threads(work: Callable[[str], T], names: tuple[str, ...]) -> list[T]:
    """Calls `work` on each name, in order; the first error is raised."""
    count = min(_MAX_THREADS, os.cpu_count() or 1, len(names))
    if count < 2:
        return [work(name) for name in names]
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, names))


def _entry(path: Path, *, sync: bool = False) -> Entry:
    digest = hashlib.sha256()
    size = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
        if sync:
            os.fsync(file.fileno())
    return Entry(num_bytes=size, sha256=digest.hexdigest())


def _damaged(folder: Path, name: str, what: str) -> Problem:
    return Problem(
        code="CHECKPOINT_DAMAGED",
        key=str(folder),
        message=f"{folder / name} {what}",
        fix="Resume from another checkpoint, or copy this one anew from where it was made",
    )


def _without_manifest(folder: Path) -> Problem:
    """Says what a folder without a manifest is, and what can be done with it."""
    key = str(folder)
    if not folder.is_dir():
        inside = sorted(path.name for path in folder.parent.glob("checkpoint-*")) if folder.parent.is_dir() else []
        fix = (
            f"There is {', '.join(inside)} beside it"
            if inside
            else "Check the path; checkpoints lie in train.output_dir"
        )
        return Problem(code="CHECKPOINT_NOT_FOUND", key=key, message=f"{folder} is not a folder", fix=fix)
    if list(folder.glob("*.safetensors")):
        return Problem(
            code="CHECKPOINT_WEIGHTS_ONLY",
            key=key,
            message=f"{folder} holds weights only: no optimizer state, no step, nothing to resume",
            fix=f"For a warm start, set model: {folder} in the job and train without --resume_from_checkpoint",
        )
    tags = sorted(path.name for path in folder.glob("global_step*") if path.is_dir())
    if tags and not (folder / LATEST).exists():
        return Problem(
            code="CHECKPOINT_NO_LATEST",
            key=key,
            message=f"{folder} has no file `latest`: DeepSpeed would silently train from scratch",
            fix=f"Its tags are {', '.join(tags)}; write the one to resume into {folder / LATEST}, or choose a complete checkpoint",
            source="deepspeed runtime/engine.py load_checkpoint",
        )
    if folder.name.endswith(".partial"):
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        return Problem(
            code="CHECKPOINT_INCOMPLETE",
            key=key,
            message=f"{folder} is what a run left that ended while saving ({format_bytes(size)})",
            fix="Resume from the checkpoint before it",
        )
    held = sorted(path.name for path in folder.glob("checkpoint-*") if (path / MANIFEST).exists())
    if held:
        return Problem(
            code="CHECKPOINT_NOT_FOUND",
            key=key,
            message=f"{folder} is not a checkpoint, but holds some",
            fix=f"Name one of {', '.join(str(folder / name) for name in held)}",
        )
    return Problem(
        code="CHECKPOINT_FOREIGN" if tags else "CHECKPOINT_INCOMPLETE",
        key=key,
        message=f"{folder} has no {MANIFEST}: "
        + ("another program wrote it" if tags else "it is not a complete checkpoint of the toolkit"),
        fix="Resume from a checkpoint-STEP folder that `toolkit train` wrote",
    )
