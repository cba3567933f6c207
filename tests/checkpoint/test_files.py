"""An engine's files: what is written is what was given, its checksums are of what is on disk, and failures are told."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from toolkit.checkpoint import files as module
from toolkit.checkpoint.files import Files
from toolkit.checkpoint.host_copy import HostCopy
from toolkit.checkpoint.manifest import checksum_problems, hash_files

NAME = "global_step4/shard.pt"


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (module, __import__("toolkit.checkpoint.manifest", fromlist=["PART_BYTES"])):
        monkeypatch.setattr(place, "PART_BYTES", 2**20)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "global_step4").mkdir()
    return tmp_path


def _state() -> dict[str, Any]:
    """Parts that fill several of the file's, views of one storage, an object, and a parameter that is not trained."""
    draw = torch.Generator().manual_seed(0)
    flat = torch.randn(1_000_003, generator=draw)
    counter = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1).state_dict()
    return {
        "flat": flat,
        "views": [flat[:7], flat[5:11]],
        "tied": flat[:7],
        "overlapping": flat.as_strided((3, 2), (1, 1)),
        "empty": torch.zeros(0),
        "bf16": torch.randn(3, 5, generator=draw).to(torch.bfloat16).t(),
        "scalar": torch.tensor(3.0),
        "frozen": nn.Parameter(torch.ones(2), requires_grad=False),
        "object": counter,
        "step": 4,
    }


def _same(found: Any, wanted: Any) -> None:
    assert type(found) is type(wanted)
    if isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for key in wanted:
            _same(found[key], wanted[key])
    elif isinstance(wanted, list):
        for one, other in zip(found, wanted, strict=True):
            _same(one, other)
    elif isinstance(wanted, Tensor):
        assert (found.dtype, found.shape, found.stride()) == (wanted.dtype, wanted.shape, wanted.stride())
        assert found.requires_grad == wanted.requires_grad
        assert torch.equal(found, wanted)
    else:
        assert found == wanted


def _saved(folder: Path, state: Any, *, copy: HostCopy | None, meanwhile: Callable[[], None] = lambda: None) -> Any:
    files = Files(folder, copy=copy)
    if copy is not None:
        copy.begin()
    files.save(state, folder / NAME)
    meanwhile()
    if copy is not None:
        files.start()
    files.close()
    assert files.is_done
    assert files.entries == hash_files(folder, [NAME])
    assert files.entries[NAME].part_bytes == 2**20
    assert checksum_problems(folder, files.entries, [NAME]) == []
    return torch.load(folder / NAME, weights_only=True)


def test_what_is_written_at_once(folder: Path) -> None:
    _same(_saved(folder, _state(), copy=None), _state())
    torch.save(_state(), folder / "reference.pt")
    assert (folder / NAME).stat().st_size == pytest.approx((folder / "reference.pt").stat().st_size, abs=4096)


def test_what_changes_after_the_copy_is_not_written(folder: Path) -> None:
    copy, state = HostCopy(torch.device("cpu")), _state()
    copy.prepare(1000)  # too little: it grows

    def train() -> None:
        state["flat"].fill_(7.0)
        state["object"]["param_groups"][0]["lr"] = 0.5
        state["step"] = 5

    found = _saved(folder, state, copy=copy, meanwhile=train)
    _same(found, _state())
    found["tied"][0] = 1.0
    assert found["views"][0][0] == 1.0, "what was one part still is"
    blocks = list(copy._blocks)
    _same(_saved(folder, _state(), copy=copy), _state())
    assert copy._blocks == blocks, "the memory is used again"


def test_memory_that_is_used_again_before_the_next_file_is_copied_again() -> None:
    """The engine gathers weights for one file after the other, at one address."""
    copy, gathered = HostCopy(torch.device("cpu")), torch.zeros(100)
    copy.begin()
    first = copy.take({"weight": gathered})
    second = copy.take({"weight": gathered.fill_(1)})
    copy.finish()
    assert first()["weight"].tolist() == [0] * 100
    assert second()["weight"].tolist() == [1] * 100


def test_safetensors(folder: Path) -> None:
    tensors = {"b": torch.arange(6).view(2, 3), "a": torch.randn(400_000), "c": torch.ones(3, dtype=torch.bfloat16)}
    files = Files(folder)
    files.save_tensors(folder / "t.safetensors", tensors, {"format": "pt"})
    files.close()
    with safe_open(folder / "t.safetensors", "pt") as found:
        assert found.metadata() == {"format": "pt"}
        assert set(found.keys()) == set(tensors)
        for name, tensor in tensors.items():
            assert torch.equal(found.get_tensor(name), tensor)


@pytest.mark.parametrize("behind", [False, True])
def test_a_failed_write_is_told_as_itself(folder: Path, monkeypatch: pytest.MonkeyPatch, behind: bool) -> None:
    """torch's own words would be "unexpected pos"; behind the training it is told when the files are waited for."""
    write = os.pwrite

    def full(number: int, data: Any, at: int) -> int:
        if at >= 2**21:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(number, data, at)

    monkeypatch.setattr(module.os, "pwrite", full)
    copy = HostCopy(torch.device("cpu")) if behind else None
    files = Files(folder, copy=copy)

    def save() -> None:
        files.save(_state(), folder / NAME)
        if behind:
            files.start()
        files.close()

    with pytest.raises(OSError, match="No space left on device"):
        save()
    assert not files.entries
    assert files.is_done
