"""Reads what `torch.save` wrote as data: tensors, plain values, and the few classes that DeepSpeed and NumPy put there.

A pickle may name any function of any installed package and have it called. That a checkpoint's checksums agree says that it
is whole, not who wrote it; so nothing but these classes is ever looked up, whoever wrote the file.
"""

from __future__ import annotations

import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from toolkit.errors import CheckpointError, first_line
from toolkit.io import plain_file

_ZIP = b"PK\x03\x04"
# What torch's refusals name (torch _weights_only_unpickler.py Unpickler.load).
_NAMED = re.compile(r"GLOBAL (\S+)|but got (<class '[^']+'>)|function (\S+)")


def read_pickle(folder: Path, name: str, *, mmap: bool = False, map_location: Any = "cpu") -> dict[str, Any]:
    """Reads a dictionary that `torch.save` wrote; nothing of the file runs.

    Args:
        folder: What the file must lie in.
        name: Relative to it.
        mmap: Maps the tensors, so that each is read when it is used.
        map_location: As in `torch.load`.

    Raises:
        CheckpointError: CHECKPOINT_UNSAFE when it asks for a class or a function that is not of those that may be there.
        ValueError: It cannot be read, or holds something else; the message goes on after the file's path.
    """
    try:
        path = plain_file(folder, name)
        with path.open("rb") as file:
            if file.read(len(_ZIP)) != _ZIP:
                raise OSError("is not an archive that `torch.save` writes")
        with torch.serialization.safe_globals(_allowed()), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of other protocols and TorchScript, which are refused
            value = torch.load(path, map_location=map_location, mmap=mmap, weights_only=True)
    except Exception as error:  # a truncated archive raises anything from EOFError to RuntimeError
        reason = first_line(error)
        if isinstance(error, pickle.UnpicklingError) or "weights_only" in reason:
            raise _unsafe(folder / name, str(error)) from None
        raise ValueError(f"cannot be read: {reason}") from None
    if not isinstance(value, dict):
        raise ValueError("does not hold a state")
    return value


def _allowed() -> list[Any]:
    """Classes beyond those that torch allows by itself (torch _weights_only_unpickler.py _get_allowed_globals).

    Source:
        deepspeed 0.19.8 runtime/zero/stage_1_and_2.py, stage3.py, bf16_optimizer.py: state_dict; numpy random get_state.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    reconstruct = np.empty(0).__reduce__()[0]
    return [
        *(fragment_address, LossScaler, DynamicLossScaler, ZeroStageEnum),
        # Which of the two names a file has depends on the NumPy that wrote it: 2, or 1.
        *((reconstruct, f"numpy.{core}.multiarray._reconstruct") for core in ("_core", "core")),
        *(np.ndarray, np.dtype, type(np.dtype(np.uint32))),
    ]


def _unsafe(path: Path, what: str) -> CheckpointError:
    found = _NAMED.search(what)
    named = next((group for group in found.groups() if group), "") if found else ""
    return CheckpointError.of(
        code="CHECKPOINT_UNSAFE",
        key=str(path),
        message=f"{path} is more than data: reading it would call {named or 'what it names'}, which no saved state needs",
        fix="Nothing of it has run. Do not use it: take the checkpoint from where it was trained, or another one",
    )
