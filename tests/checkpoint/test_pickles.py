"""What `torch.save` wrote is read as data: states as they were saved, and nothing else."""

from __future__ import annotations

import collections
import os
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.utils.tensor_fragment import fragment_address
from hostile_files import NAMED, Calls

from toolkit.checkpoint.pickles import read_pickle
from toolkit.errors import CheckpointError


def _refused(folder: Path) -> str:
    codes = []
    for mmap in (True, False):
        with pytest.raises(CheckpointError) as caught:
            read_pickle(folder, "a.pt", mmap=mmap)
        codes.append(caught.value.codes)
    assert codes == [("CHECKPOINT_UNSAFE",)] * 2
    return str(caught.value)


def test_what_an_engine_saves_is_read_as_it_was(tmp_path: Path) -> None:
    scaler = DynamicLossScaler(2.0**16, 2.0, 1000, 1, 2, False, dtype=torch.float16)
    state = {
        "scaler": scaler,
        "slices": [{"weight": fragment_address(numel=3, start=1)}],
        "numpy": np.random.get_state(),
        "python": random.getstate(),
        "shapes": [collections.OrderedDict(weight=torch.Size([2, 3]))],
    }
    torch.save(state, tmp_path / "a.pt")
    read = read_pickle(tmp_path, "a.pt", mmap=True)
    assert vars(read["scaler"]) == vars(scaler)
    assert (read["slices"], read["shapes"], read["python"]) == (state["slices"], state["shapes"], state["python"])
    assert np.array_equal(read["numpy"][1], state["numpy"][1])


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_call_is_refused_in_every_protocol(tmp_path: Path, protocol: int) -> None:
    torch.save({"a": Calls(tmp_path / "made")}, tmp_path / "a.pt", pickle_protocol=protocol)
    message = _refused(tmp_path)
    assert protocol == 4 or f"would call {NAMED}" in message
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "value",
    [collections.deque, np.array([object()]), torch.nn.Linear(1, 1), os.fspath],
    ids=lambda value: type(value).__name__,
)
def test_a_class_that_is_not_listed_is_refused(tmp_path: Path, value: Any) -> None:
    torch.save({"a": value}, tmp_path / "a.pt")
    _refused(tmp_path)


def test_what_is_no_state_is_a_value_error(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"a": torch.ones(1000)}, path)
    whole = path.read_bytes()
    torch.save([1], path)
    a_list = path.read_bytes()
    a_bare_pickle = pickle.dumps({"a": Calls(tmp_path / "made")})
    for content in (b"", bytes(100), whole[:-700], a_bare_pickle, a_list):
        path.write_bytes(content)
        for mmap in (True, False):
            with pytest.raises(ValueError):
                read_pickle(tmp_path, "a.pt", mmap=mmap)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match="is a pipe"):
        read_pickle(tmp_path, "a.pt")
    with pytest.raises(ValueError, match="points outside"):
        read_pickle(tmp_path, "/dev/zero")
    assert not (tmp_path / "made").exists()
