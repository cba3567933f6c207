"""Writing of safetensors shards tensor by tensor, and atomic replacement of a folder by a finished one."""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor

from toolkit.checkpoint.disk import LIFT_LIMIT, file_limit
from toolkit.errors import CheckpointError, RunError
from toolkit.exporter.block_file import BlockFile
from toolkit.io import make_folder, write_json
from toolkit.modeling.safetensors_folder import DTYPES

_SAMPLE_BYTES = 64 * 2**10  # read back at each end of a tensor
_CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The safetensors header entry of a tensor to write."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size of its data, bytes."""
        numel = 1
        for size in self.shape:
            numel *= size
        return numel * self.dtype.itemsize


@dataclass(slots=True)
class ShardWriter:
    """A writer of tensors in any order, with only one in memory at a time, into the files that `save_pretrained` would make.

    The headers are written first and fix every tensor's offset in its file, so a tensor is written in place when it
    is given, and several shards grow at once.

    Args:
        folder: Folder of the files.
        entries: Entries of all tensors that will be written.
        max_shard_size_bytes: Size above which a new file begins, bytes.
        stem: File name without ending: `model`, or `adapter_model`.
    Raises:
        RunError: EXPORT_WRITE, if writing fails.
    Source:
        safetensors README, "Format": 8 bytes of header length, JSON header, values.
    """

    folder: Path
    entries: list[Entry]
    max_shard_size_bytes: int
    stem: str = "model"
    digests: dict[str, str] = field(default_factory=dict)
    file_of: dict[str, str] = field(default_factory=dict)
    _files: dict[str, BlockFile] = field(default_factory=dict)
    _starts: dict[str, int] = field(default_factory=dict)
    _waiting: dict[str, Entry] = field(default_factory=dict)

    def __enter__(self) -> ShardWriter:
        split = split_state_dict_into_shards_factory(
            {entry.name: entry for entry in self.entries},
            get_storage_size=lambda entry: entry.num_bytes,
            filename_pattern=f"{self.stem}{{suffix}}.safetensors",
            max_shard_size=self.max_shard_size_bytes,
        )
        self.file_of = split.tensor_to_filename
        self._waiting = {entry.name: entry for entry in self.entries}
        for name, tensors in split.filename_to_tensors.items():
            with _disk(self.folder / name):
                self._begin(name, [self._waiting[tensor] for tensor in tensors])
        return self

    def __exit__(self, *failure: Any) -> None:
        for name, file in self._files.items():
            with _disk(self.folder / name) if failure[0] is None else contextlib.suppress(OSError):
                file.sync()
            file.close()
        if failure[0] is None:
            self._finish()

    @property
    def num_bytes(self) -> int:
        """Total size of the data, bytes."""
        return sum(entry.num_bytes for entry in self.entries)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one tensor, in any thread; its shape and dtype must be those of its entry.

        Args:
            name: Key of the tensor.
            tensor: Tensor on the CPU.
        """
        entry = self._waiting.pop(name)
        if (tuple(tensor.shape), tensor.dtype) != (entry.shape, entry.dtype):
            raise ValueError(f"{name} is {tuple(tensor.shape)} {tensor.dtype}, was planned as {entry}")
        values = tensor_bytes(tensor)
        with _disk(self.folder / self.file_of[name]):
            self._files[self.file_of[name]].write_at(values, self._starts[name])
        self.digests[name] = sample_digest(values)

    def _begin(self, file_name: str, shard: list[Entry]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        # Widest first, as safetensors itself does: every tensor then starts at a multiple of its item size.
        for entry in sorted(shard, key=lambda entry: -entry.dtype.itemsize):
            end = offset + entry.num_bytes
            code = _CODES[entry.dtype]
            header[entry.name] = {"dtype": code, "shape": list(entry.shape), "data_offsets": [offset, end]}
            self._starts[entry.name] = offset
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._files[file_name] = BlockFile(
            self.folder / file_name, len(text).to_bytes(8, "little") + text, 8 + len(text) + offset
        )
        for entry in shard:
            self._starts[entry.name] += 8 + len(text)

    def _finish(self) -> None:
        if self._waiting:
            raise ValueError(
                f"{len(self._waiting)} tensors were planned and never given, first {next(iter(self._waiting))}"
            )
        if len(self._files) > 1:
            numel = sum(entry.num_bytes // entry.dtype.itemsize for entry in self.entries)
            index = {
                "metadata": {"total_size": self.num_bytes, "total_parameters": numel},
                "weight_map": dict(sorted(self.file_of.items())),
            }
            path = self.folder / f"{self.stem}.safetensors.index.json"
            with _disk(path):
                write_json(path, index)


def check_apart(source: Path, target: Path) -> None:
    """Refuse to write over what is read: `staged_folder` replaces all that is in its target.

    Raises:
        CheckpointError: EXPORT_EXISTS, if `target` is `source`, contains it or lies in it.
    """
    if target.resolve() != source.resolve() and target.resolve().is_relative_to(source.resolve()):
        raise CheckpointError.of(
            code="EXPORT_EXISTS",
            key=str(target),
            message=f"{target} lies in {source}, the checkpoint itself, which is not added to",
            fix="Name another folder",
        )
    if source.resolve().is_relative_to(target.resolve()):
        raise CheckpointError.of(
            code="EXPORT_EXISTS",
            key=str(target),
            message=f"{target} contains {source}, the checkpoint itself, which would be replaced",
            fix="Name another folder",
        )


def check_free(target: Path, *, overwrite: bool) -> None:
    """Refuse to replace what is at `target`, unless it is an empty folder, or one that may be overwritten: a file is never replaced.

    Raises:
        CheckpointError: EXPORT_EXISTS.
    """
    if target.is_dir():
        if overwrite or not any(target.iterdir()):
            return
        what, fix = "is not empty", "Name a new folder, or pass overwrite=True (--overwrite) to replace it"
    elif os.path.lexists(target):
        what, fix = "is not a folder, and is not replaced by one", "Name a new folder, or move that file"
    else:
        return
    raise CheckpointError.of(code="EXPORT_EXISTS", key=str(target), message=f"{target} exists and {what}", fix=fix)


@contextlib.contextmanager
def staged_folder(target: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yield an empty folder next to `target` that replaces it if the block succeeds, and else is removed.

    Raises:
        CheckpointError: EXPORT_EXISTS, as `check_free`.
        RunError: EXPORT_WRITE, if writing fails.
    """
    host = socket.gethostname()
    _remove_abandoned(target, host)
    check_free(target, overwrite=overwrite)
    staged = target.with_name(f".{target.name}.partial-{host}-{os.getpid()}")
    replaced = target.with_name(f".{target.name}.replaced-{host}-{os.getpid()}")
    try:
        with _disk(target):
            make_folder(staged.parent)
            staged.mkdir()
        yield staged
        with _disk(target):
            if target.exists():
                target.rename(replaced)
            staged.rename(target)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
        _put_back(replaced, target)


def _put_back(replaced: Path, target: Path) -> None:
    """Give what was to be replaced its name again if nothing has that; else remove it."""
    if not replaced.exists():
        return
    if not target.exists():
        replaced.rename(target)
    elif replaced.is_symlink():
        replaced.unlink()
    else:
        shutil.rmtree(replaced, ignore_errors=True)


def _remove_abandoned(target: Path, host: str) -> None:
    """Remove the hidden folders of killed exports to `target`, each as large as the model; what one was about to replace comes back."""
    for kind in ("partial", "replaced"):
        stem = f".{target.name}.{kind}-{host}-"
        for path in target.parent.glob(f"{glob.escape(stem)}*"):
            pid = path.name.removeprefix(stem)
            if not pid.isdecimal() or psutil.pid_exists(int(pid)):
                continue
            if kind == "partial":
                shutil.rmtree(path, ignore_errors=True)
            else:
                with _disk(target):
                    _put_back(path, target)


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's data as safetensors stores them: row-major, little-endian."""
    flat: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def sample_digest(values: memoryview) -> str:
    """Return the SHA-256 of a tensor's first and last bytes, which a read-back compares."""
    digest = hashlib.sha256(values[:_SAMPLE_BYTES])
    digest.update(values[-_SAMPLE_BYTES:])
    return digest.hexdigest()


@contextlib.contextmanager
def _disk(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        limited = error.errno == errno.EFBIG
        what, fix = error.strerror or str(error), "Free disk space or name another folder"
        if limited:
            what, fix = file_limit() or what, f"{LIFT_LIMIT}, or export with a smaller --max-shard-size"
        raise RunError.of(
            code="EXPORT_WRITE",
            key=str(path),
            message=f"{path} cannot be written: {what}",
            fix=f"{fix}, then export again; the checkpoint is untouched",
        ) from error
