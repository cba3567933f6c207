"""Reading of `torch.save` files as data: tensors, plain values, and the few classes that DeepSpeed and NumPy add.

A pickle may name any function of any installed package and have it called. Matching checksums show that a checkpoint
is whole, not who wrote it; so only these classes are looked up, whoever wrote the file.
"""

from __future__ import annotations

import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from toolkit.distributed.deepspeed_private import pickled_classes
from toolkit.errors import CheckpointError, first_line
from toolkit.io import plain_file

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
    try:
        path = plain_file(folder, name)
        with path.open("rb") as file:
            if file.read(len(_ZIP)) != _ZIP:
                raise OSError("is not an archive that `torch.save` writes")
        with torch.serialization.safe_globals(_allowed(stand_ins=stand_ins)), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about other protocols and TorchScript, which are refused
            value = torch.load(path, map_location=map_location, mmap=mmap, weights_only=True)
    except Exception as error:  # a truncated archive raises anything from EOFError to RuntimeError
        reason = first_line(error)
        if isinstance(error, pickle.UnpicklingError) or "weights_only" in reason:
            raise _unsafe(folder / name, str(error)) from None
        raise ValueError(f"cannot be read: {reason}") from None
    if not isinstance(value, dict):
        raise ValueError("has no state")
    return value


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
