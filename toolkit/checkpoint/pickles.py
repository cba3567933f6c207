"""Reading of `torch.save` files as data: tensors, plain values, and the few classes that DeepSpeed and NumPy add.

A pickle may name any function of any installed package and have it called. Matching checksums show that a checkpoint
is whole, not who wrote it; so only these classes are looked up, whoever wrote the file.
"""

from __future__ import annotations

import io
import pickle
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from toolkit.distributed.deepspeed_private import pickled_classes
from toolkit.errors import CheckpointError, first_line
from toolkit.io import MAX_FOREIGN_BYTES, plain_file, read_plain

_ZIP = b"PK\x03\x04"
# Names in torch's error messages (torch _weights_only_unpickler.py Unpickler.load).
_NAMED = re.compile(r"GLOBAL (\S+)|but got (<class '[^']+'>)|function (\S+)")


# The classes of `pickled_classes`, by what stands in for them where DeepSpeed is not imported.
_STAND_INS = (
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
)
_STAGE = "deepspeed.runtime.zero.config.ZeroStageEnum"


class Attributes:
    """The attributes of an object of a class that is not imported."""


def read_pickle(
    folder: Path, name: str, *, mmap: bool = False, map_location: Any = "cpu", stand_ins: bool = False
) -> dict[str, Any]:
    """Read a dictionary that `torch.save` wrote; no code of the file runs.

    Args:
        folder: Folder that must contain the file.
        name: Path relative to it.
        mmap: Maps the tensors, so that each is read when it is used.
        map_location: As in `torch.load`.
        stand_ins: Whether objects of DeepSpeed's classes are read as `Attributes`, and its stages as numbers, without importing it.

    Raises:
        CheckpointError: CHECKPOINT_UNSAFE when it names a class or a function that is not allowed.
        ValueError: It cannot be read, or is not a dictionary; the message continues after the file's path.
    """
    with _refusing(folder / name):
        path = plain_file(folder, name)
        with path.open("rb") as file:
            if file.read(len(_ZIP)) != _ZIP:
                raise OSError("is not an archive that `torch.save` writes")
        value = _load(path, stand_ins=stand_ins, map_location=map_location, mmap=mmap)
    if not isinstance(value, dict):
        raise ValueError("has no state")
    return value


def read_tensor(folder: Path, name: str, *, start: int = 0, length: int | None = None) -> torch.Tensor:
    """Read one tensor, or one number, that `torch.save` wrote as a file, or as a part of one.

    Args:
        folder: Folder that must contain the file.
        name: Path relative to it.
        start: Offset of the part, bytes.
        length: Size of the part, bytes; up to the end when left out.

    Raises:
        CheckpointError: CHECKPOINT_UNSAFE.
        ValueError: It cannot be read, or is no tensor; the message continues after the file's path.
    """
    with _refusing(folder / name):
        path = plain_file(folder, name)
        if length is None:
            value = _load(path, stand_ins=True, map_location="cpu", mmap=True)
        else:
            with path.open("rb") as file:
                file.seek(start)
                content = file.read(length)
            if content[: len(_ZIP)] != _ZIP:
                raise OSError("has no archive that `torch.save` writes where its index says")
            value = _load(io.BytesIO(content), stand_ins=True, map_location="cpu", mmap=False)
        if isinstance(value, dict):  # DeepSpeed's universal format: with the dim that tensor ranks share
            value = value.get("param")
    if isinstance(value, int | float):  # in the same, the count of steps of DeepSpeed's own Adam
        value = torch.tensor(value)
    if not isinstance(value, torch.Tensor):
        raise ValueError("has no tensor")
    return value.detach()


def _load(file: Any, *, stand_ins: bool, map_location: Any, mmap: bool) -> Any:
    with torch.serialization.safe_globals(_allowed(stand_ins=stand_ins)), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about other protocols and TorchScript, which are refused
        return torch.load(file, map_location=map_location, mmap=mmap, weights_only=True)


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """Turn the refusal of a name into CHECKPOINT_UNSAFE, and whatever else a damaged file raises into a ValueError."""
    try:
        yield
    except Exception as error:  # a truncated archive raises anything from EOFError to RuntimeError
        reason = first_line(error)
        if isinstance(error, pickle.UnpicklingError) or "weights_only" in reason:
            raise _unsafe(path, str(error)) from None
        raise ValueError(f"cannot be read: {reason}") from None


class Values(Attributes):
    """The state of an object whose class has its own order for it."""

    def __setstate__(self, state: Any) -> None:
        self.values = state


_METADATA = "torch.distributed.checkpoint.metadata"
# What the index of torch's distributed checkpoint names (torch distributed/checkpoint/metadata.py, filesystem.py), and what stands for it.
_INDEX_NAMES: dict[tuple[str, str], Any] = {
    **{
        (_METADATA, name): Attributes
        for name in (
            *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
            *("MetadataIndex", "StorageMeta"),
        )
    },
    (_METADATA, "TensorProperties"): Values,
    (_METADATA, "_MEM_FORMAT_ENCODING"): int,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): Attributes,
    ("torch.serialization", "_get_layout"): str,
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): dict,
    **{("pathlib", name): lambda *parts: "/".join(map(str, parts)) for name in ("PosixPath", "WindowsPath")},
    **{
        ("torch", str(dtype).removeprefix("torch.")): dtype
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype)
    },
}


class _RefusedError(Exception):
    """A pickle names what it may not."""


class _IndexUnpickler(pickle.Unpickler):
    """Reads what an index holds; every other name is refused before anything is called."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _INDEX_NAMES[module, name]
        except KeyError:
            raise _RefusedError(f"GLOBAL {module}.{name}") from None


def read_index(folder: Path, name: str) -> Any:
    """Read the index of a folder of torch's distributed checkpoint, `.metadata`, which is a pickle; no code of it runs.

    Returns:
        Attributes as `torch.distributed.checkpoint.metadata.Metadata` has them; sizes are tuples.

    Raises:
        CheckpointError: CHECKPOINT_UNSAFE.
        ValueError: It cannot be read; the message continues after the file's path.
    """
    try:
        return _IndexUnpickler(io.BytesIO(read_plain(folder, name, max_bytes=MAX_FOREIGN_BYTES))).load()
    except _RefusedError as error:
        raise _unsafe(folder / name, str(error)) from None
    except Exception as error:  # a pickle that is cut short raises anything
        raise ValueError(f"cannot be read: {first_line(error)}") from None


def _allowed(*, stand_ins: bool) -> list[Any]:
    """Return the classes allowed in addition to torch's own (torch _weights_only_unpickler.py _get_allowed_globals).

    Source:
        numpy random get_state, for the random state that we save.
    """
    reconstruct = np.empty(0).__reduce__()[0]
    return [
        *([(int, _STAGE), *((Attributes, path) for path in _STAND_INS)] if stand_ins else pickled_classes()),
        # A file has one of the two names, depending on the NumPy that wrote it: 2, or 1.
        *((reconstruct, f"numpy.{core}.multiarray._reconstruct") for core in ("_core", "core")),
        *(np.ndarray, np.dtype, type(np.dtype(np.uint32))),
    ]


def _unsafe(path: Path, what: str) -> CheckpointError:
    found = _NAMED.search(what)
    named = next((group for group in found.groups() if group), "") if found else ""
    return CheckpointError.of(
        code="CHECKPOINT_UNSAFE",
        key=str(path),
        message=f"{path} contains more than data: loading it would call {named or 'what it names'}, which no saved "
        "state needs",
        fix="None of it was run. Do not use it: copy the checkpoint again from where it was trained, or use another "
        "one",
    )
