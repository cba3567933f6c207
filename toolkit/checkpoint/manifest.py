"""The manifest of a checkpoint: the files that must be there, byte for byte. Nothing else is trusted before they match."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from toolkit.checkpoint.archives import index_digest
from toolkit.checkpoint.layout import LATEST, MANIFEST, MODEL, PLAN, RANDOM, STATE, is_tag
from toolkit.errors import CheckpointError, Problem, raise_all
from toolkit.io import MAX_TEXT_BYTES, open_plain, plain_file, read_plain, write_json
from toolkit.planning.checkpoint_size import PART_BYTES
from toolkit.units import format_bytes

A = TypeVar("A")
T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

_CHUNK_BYTES = 8 * 2**20
_HEX = "^[0-9a-f]{64}$"

# hashlib lets other threads run while it hashes a chunk. One core hashes 0.5 to 2 GB/s, a local NVMe reads 3 to 7 GB/s: four
# threads saturate it, and all ranks of a node hash at once.
_MAX_THREADS = 4

_PARTIAL = ".partial"
# What tells folders that `toolkit checkpoint adopt` reads (toolkit/exporter/other_folders.py).
ADOPTABLE = (f"{LATEST}*", "*_states.pt", ".metadata", "pytorch_model_fsdp*/.metadata", "zero")


class Entry(BaseModel):
    """What a file is: its size in bytes and SHA-256 in hexadecimal, and of a file of tensors that of its index, as `index_digest`.

    With `part_bytes` that is the SHA-256 of the SHA-256 of each part of so many bytes, one after another, of 32 bytes each.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", populate_by_name=True)

    num_bytes: Annotated[int, Field(ge=0, lt=2**63)] = Field(validation_alias="bytes", serialization_alias="bytes")
    sha256: Annotated[str, Field(pattern=_HEX)]
    index: Annotated[str, Field(pattern=_HEX)] | None = None
    part_bytes: Annotated[int, Field(ge=2**20, le=2**40)] | None = None

    @classmethod
    def of_parts(cls, digests: Sequence[bytes], *, num_bytes: int) -> Entry:
        """Return the entry of a file from the SHA-256 of each of its parts of `PART_BYTES`."""
        whole = num_bytes <= PART_BYTES
        return cls(
            num_bytes=num_bytes, sha256=_combined(digests, whole=whole), part_bytes=None if whole else PART_BYTES
        )


def _combined(digests: Sequence[bytes], *, whole: bool) -> str:
    return digests[0].hex() if whole else hashlib.sha256(b"".join(digests)).hexdigest()


def _relative(name: str) -> str:
    parts = name.split("/")
    if not all(parts) or {".", ".."} & set(parts) or not name.isprintable():
        raise ValueError("it names no file inside the checkpoint")
    return name


class Manifest(BaseModel):
    """Every file of a checkpoint but the manifest, by its path below the folder."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    format: Literal[1, 2]  # 2 has files that are hashed by parts
    files: dict[Annotated[str, Field(max_length=4096), AfterValidator(_relative)], Entry]


def list_files(folder: Path) -> tuple[str, ...]:
    """Return the relative paths of every file of a checkpoint but the manifest, sorted."""
    found = (path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    return tuple(sorted(path.relative_to(folder).as_posix() for path in found))


def hash_files(folder: Path, names: Iterable[str], *, sync: bool = False) -> dict[str, Entry]:
    """Return the entries of some files, read by a few threads; `sync` also forces each to disk."""
    sizes: dict[str, int] = {}
    for name in names:
        with open_plain(folder, name) as file:
            sizes[name] = os.fstat(file.fileno()).st_size
            if sync:
                os.fsync(file.fileno())
    found = _digests(folder, {name: (size, PART_BYTES) for name, size in sizes.items()})
    for part in (part for parts in found.values() for part in parts):
        if not isinstance(part, bytes):
            raise part
    return {name: Entry.of_parts(found[name], num_bytes=size) for name, size in sizes.items()}


def share(names: Iterable[str], *, rank: int, world_size: int) -> tuple[str, ...]:
    """Return a rank's share of the files, so that all ranks hash at once."""
    return tuple(name for index, name in enumerate(names) if index % world_size == rank)


def write_manifest(folder: Path, entries: Mapping[str, Entry]) -> None:
    """Write the manifest, last of all files, with the indexes of those that have one."""
    in_parts = any(entry.part_bytes is not None for entry in entries.values())
    indexed = {name: _indexed(folder, name, entry) for name, entry in sorted(entries.items())}
    made = Manifest(format=2 if in_parts else 1, files=indexed)
    write_json(folder / MANIFEST, made.model_dump(mode="json", by_alias=True, exclude_none=True), sync=True)


def _indexed(folder: Path, name: str, entry: Entry) -> Entry:
    try:
        return entry.model_copy(update={"index": index_digest(folder, name)})
    except (OSError, ValueError):  # the file is compared as a whole
        return entry


def read_manifest(folder: Path) -> dict[str, Entry]:
    """Read the manifest.

    Raises:
        CheckpointError: CHECKPOINT_NOT_FOUND, CHECKPOINT_WEIGHTS_ONLY, CHECKPOINT_NO_LATEST, CHECKPOINT_OTHER_TOOL,
            CHECKPOINT_INCOMPLETE or CHECKPOINT_DAMAGED, each with what to do.
    """
    try:
        content = read_plain(folder, MANIFEST, max_bytes=MAX_TEXT_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(_without_manifest(folder)) from None
    except OSError as error:
        raise CheckpointError(damaged(folder, MANIFEST, f"cannot be read: {error}")) from None
    return parse_typed(Manifest, content, folder, MANIFEST).files


def read_small(folder: Path, name: str) -> bytes:
    """Read a file of a complete checkpoint that fits in memory, and compare its checksum.

    Raises:
        CheckpointError: Those of `read_manifest`; CHECKPOINT_DAMAGED.
    """
    entry = read_manifest(folder).get(name)
    if entry is None:
        raise CheckpointError(damaged(folder, name, f"is not in {MANIFEST}"))
    try:
        content = read_plain(folder, name, max_bytes=MAX_TEXT_BYTES)
    except OSError as error:
        raise CheckpointError(damaged(folder, name, _reason(error))) from None
    size = entry.part_bytes or max(len(content), 1)
    parts = [hashlib.sha256(content[at : at + size]).digest() for at in range(0, max(len(content), 1), size)]
    if _combined(parts, whole=entry.part_bytes is None) != entry.sha256:
        raise CheckpointError(damaged(folder, name, _OTHER_CHECKSUM))
    return content


def parse_typed(model: type[M], content: bytes, folder: Path, name: str) -> M:
    """Read the JSON of a checkpoint's file as a pydantic model.

    Raises:
        CheckpointError: CHECKPOINT_DAMAGED, for a wrong encoding, JSON, type or value.
    """
    try:
        return model.model_validate_json(content, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        what = f"cannot be read: {f'{place:.200}: ' if place else ''}{first['msg']}"
        raise CheckpointError(damaged(folder, name, what)) from None


def size_problems(folder: Path, manifest: Mapping[str, Entry]) -> list[Problem]:
    """Compare presence, kind and size of the files, without reading contents.

    In folders that are read as a whole, a file that the manifest does not name is a problem too: it was never hashed.
    """
    problems = []
    for name, entry in manifest.items():
        try:
            found = plain_file(folder, name).stat().st_size
        except (OSError, ValueError) as error:
            problems.append(damaged(folder, name, _reason(error)))
            continue
        if found != entry.num_bytes:
            problems.append(damaged(folder, name, f"has {found} bytes, the manifest says {entry.num_bytes}"))
    return problems + [damaged(folder, name, f"is not in {MANIFEST}") for name in _unnamed(folder, manifest)]


def checksum_problems(folder: Path, manifest: Mapping[str, Entry], names: Iterable[str]) -> list[Problem]:
    """Compare the contents of some files, whose sizes are those of the manifest."""
    wanted = {name: manifest[name] for name in names}
    sizes = {name: (entry.num_bytes, entry.part_bytes or max(entry.num_bytes, 1)) for name, entry in wanted.items()}
    problems = []
    for name, parts in _digests(folder, sizes).items():
        failed = next((part for part in parts if not isinstance(part, bytes)), None)
        if failed is not None:
            problems.append(damaged(folder, name, _reason(failed)))
        elif _combined(parts, whole=wanted[name].part_bytes is None) != wanted[name].sha256:
            problems.append(damaged(folder, name, _OTHER_CHECKSUM))
    return problems


def content_problems(folder: Path, manifest: Mapping[str, Entry], names: Iterable[str]) -> list[Problem]:
    """Compare the contents of some files, whose sizes are those of the manifest, and what it says of the tensors in them."""
    named = {name: manifest[name] for name in names}
    return checksum_problems(folder, manifest, named) or index_problems(folder, named)


def index_problems(folder: Path, manifest: Mapping[str, Entry]) -> list[Problem]:
    """Compare what the files of tensors say of them: a few KB of each."""

    def check(name: str) -> Problem | None:
        wanted = manifest[name].index
        try:
            return None if wanted == index_digest(folder, name) else damaged(folder, name, _OTHER_TENSORS)
        except (OSError, ValueError) as error:
            return damaged(folder, name, _reason(error))

    named = tuple(name for name, entry in manifest.items() if entry.index is not None)
    return [problem for problem in _in_threads(check, named) if problem is not None]


def verify(folder: Path, *, unread: Callable[[str], bool] | None = None) -> dict[str, Entry]:
    """Check a checkpoint in one process.

    Args:
        folder: Checkpoint folder.
        unread: Returns True for names of files whose contents will not be used: only presence, kind and size are checked.

    Returns:
        The manifest.

    Raises:
        CheckpointError: With every file that is missing, truncated, changed, or not part of the checkpoint.
    """
    manifest = read_manifest(folder)
    read = [name for name in manifest if unread is None or not unread(name)]
    raise_all(CheckpointError, size_problems(folder, manifest) or content_problems(folder, manifest, read))
    return manifest


def is_shard(name: str) -> bool:
    """Return whether a file is one of the engine's, which are all but a few MB of a checkpoint."""
    return is_tag(name.split("/")[0])


def damaged(folder: Path, name: str, what: str) -> Problem:
    """Return the problem of a file that is not what was saved.

    Args:
        folder: Checkpoint folder.
        name: Path of the file, relative to it.
        what: Text that follows its path in the message.
    """
    return Problem(
        code="CHECKPOINT_DAMAGED",
        key=str(folder),
        message=f"{folder / name} {what}",
        fix="Resume from another checkpoint, or copy this one again from where it was made",
    )


_OTHER_TENSORS = "has other tensors than the manifest says"
_OTHER_CHECKSUM = "has another SHA-256 than the manifest"


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return "is missing"
    return f"cannot be read: {error}" if isinstance(error, ValueError) or error.errno else str(error)


def _unnamed(folder: Path, manifest: Mapping[str, Entry]) -> list[str]:
    """Return files, except hidden ones, that the manifest does not name in the folders that a load or an export scans."""
    seen = set()
    for parent, _, names in os.walk(folder):  # a rename by another rank in between is not an error
        parts = Path(parent).relative_to(folder).parts
        if parts and (parts[0] in (MODEL, RANDOM) or is_tag(parts[0])):
            seen |= {"/".join((*parts, name)) for name in names if not any(part[0] == "." for part in (*parts, name))}
    return sorted(seen - manifest.keys())


def _in_threads(work: Callable[[A], T], names: tuple[A, ...]) -> list[T]:
    """Return `work` of each, in order; raise the first error."""
    count = min(_MAX_THREADS, os.cpu_count() or 1, len(names))
    if count < 2:
        return [work(name) for name in names]
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, names))


def _digests(folder: Path, files: Mapping[str, tuple[int, int]]) -> dict[str, list[Any]]:
    """Return the SHA-256 of each part of some files, given their sizes and those of their parts, or why it cannot be read."""
    parts = tuple((name, start, step) for name, (size, step) in files.items() for start in range(0, max(size, 1), step))
    found: dict[str, list[Any]] = {name: [] for name in files}
    for (name, _, _), digest in zip(parts, _in_threads(lambda part: _digest(folder, *part), parts), strict=True):
        found[name].append(digest)
    return found


def _digest(folder: Path, name: str, start: int, size: int) -> bytes | OSError | ValueError:
    digest = hashlib.sha256()
    try:
        with open_plain(folder, name) as file:
            file.seek(start)
            while size and (chunk := file.read(min(size, _CHUNK_BYTES))):
                digest.update(chunk)
                size -= len(chunk)
    except (OSError, ValueError) as error:
        return error
    return digest.digest()


def _without_manifest(folder: Path) -> Problem:
    """Return the problem of a folder without a manifest: what the folder is, and what to do with it."""
    key = str(folder)
    if not folder.is_dir():
        inside = sorted(path.name for path in folder.parent.glob("checkpoint-*")) if folder.parent.is_dir() else []
        fix = f"Its folder has {', '.join(inside)}" if inside else "Check the path; checkpoints are in train.output_dir"
        return Problem(code="CHECKPOINT_NOT_FOUND", key=key, message=f"{folder} is not a folder", fix=fix)
    if {PLAN, STATE} <= {path.name for path in folder.iterdir()} and not folder.name.endswith(_PARTIAL):
        return damaged(folder, MANIFEST, "is missing")
    if folder.name.endswith(_PARTIAL):
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        return Problem(
            code="CHECKPOINT_INCOMPLETE",
            key=key,
            message=f"{folder} was left by a run that ended while saving ({format_bytes(size)})",
            fix="Resume from the checkpoint before it",
        )
    held = sorted(path.name for path in folder.glob("checkpoint-*") if (path / MANIFEST).exists())
    if held:
        return Problem(
            code="CHECKPOINT_NOT_FOUND",
            key=key,
            message=f"{folder} is not a checkpoint, but a folder of checkpoints",
            fix=f"Name one of {', '.join(str(folder / name) for name in held)}",
        )
    return (
        _of_another_program(folder)
        or _weights_alone(folder)
        or Problem(
            code="CHECKPOINT_INCOMPLETE",
            key=key,
            message=f"{folder} has no {MANIFEST}: it is not a complete checkpoint of the toolkit",
            fix="Resume from a checkpoint-STEP folder that `toolkit train` wrote",
        )
    )


def _of_another_program(folder: Path) -> Problem | None:
    """Return the problem of a folder with another program's optimizer state; what it is called alone is looked at."""
    tags = sorted(path.name for path in folder.glob("global_step*") if path.is_dir())
    if tags and not any((folder / name).exists() for name in (LATEST, f"{LATEST}_universal")):
        return Problem(
            code="CHECKPOINT_NO_LATEST",
            key=str(folder),
            message=f"{folder} has no file `latest`: DeepSpeed would silently train from scratch",
            fix=f"Its tags are {', '.join(tags)}; write the one to resume into {folder / LATEST}, or choose a complete checkpoint",
            source="deepspeed runtime/engine.py load_checkpoint",
        )
    adoptable = any((tags, *(any(folder.glob(name)) for name in ADOPTABLE)))
    if not adoptable and not any(folder.glob("optimizer*")):
        return None
    adopt = f"Make it one of a job's: `toolkit checkpoint adopt {folder} OUT --job JOB`; or export its weights"
    return Problem(
        code="CHECKPOINT_OTHER_TOOL",
        key=str(folder),
        message=f"{folder} has no {MANIFEST}: another program wrote it",
        fix=adopt
        if adoptable
        else "Its optimizer state cannot be read here. For a warm start, set model to its weights",
    )


def _weights_alone(folder: Path) -> Problem | None:
    """Return the problem of a folder of weights, whole or of an adapter, in either format."""
    is_safe = any(folder.glob("*.safetensors"))
    if not is_safe and not any(folder.glob("*_model*.bin")):
        return None
    key = "train.lora.adapter" if (folder / "adapter_config.json").exists() else "model"
    way = f"set {key}: {folder} in the job and train without --resume_from_checkpoint"
    return Problem(
        code="CHECKPOINT_WEIGHTS_ONLY",
        key=str(folder),
        message=f"{folder} has weights only: no optimizer state and no step to resume from",
        fix=f"For a warm start, {way if is_safe else f'save them as safetensors (`save_pretrained`), {way}'}",
    )
