"""Checkpoints that are written while training goes on: what was saved is the state of the save, complete or absent, on all ranks."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from courses import parameters
from ranks import run_distributed
from safetensors.torch import load_file
from tiny_plans import step_batches, tiny_plan

import toolkit as tk
from toolkit.checkpoint import files as files_module
from toolkit.checkpoint.manifest import verify
from toolkit.errors import RunError

pytestmark = pytest.mark.gloo
CASES: dict[str, dict[str, Any]] = {
    "zero-0": {"parallel": {"zero_stage": 0}},
    "zero-2-bf16": {"train": {"precision": "bf16"}},
    "zero-3-bf16": {"parallel": {"zero_stage": 3}, "train": {"precision": "bf16"}},
    "offload": {"parallel": {"zero_stage": 3, "offload": "full-cpu"}, "train": {"optimizer": "adamw_torch"}},
    "lora": {"train": {"method": "lora", "lora": {"r": 4}}},
    "alone": {"train": {"save_only_model": True}},
    "ddp": {"parallel": {"strategy": "ddp", "zero_stage": None}, "train": {"optimizer": "adamw_torch"}},
    "fsdp2": {"parallel": {"strategy": "fsdp2", "zero_stage": None}, "train": {"optimizer": "adamw_torch"}},
    "pipeline": {"parallel": {"zero_stage": 1, "pipeline": 2}},
    "tensor": {"parallel": {"zero_stage": 1, "tensor": 2}},
}
DEFAULT = ("zero-2-bf16", "fsdp2")


def _plan(name: str, *, behind: bool) -> Any:
    options = CASES[name]
    train = {**options.get("train", {}), "save_async": behind}
    return tiny_plan("llama", **{**options, "train": train})


def _step(run: Any, step: int) -> float:
    return float(run.step(step_batches(step)[run.world.coordinate.dp]))


def _step_until_complete(run: Any, folder: Path) -> int:
    for number in range(6000):
        if folder.exists():
            return number
        _step(run, 10 + number)
        time.sleep(0.01)
    raise AssertionError("it was never complete")


def _all(rank: int, root_name: str, names: list[str]) -> dict[str, Any]:
    root, results = Path(root_name), {}
    for name in names:
        at_once, behind = (root / f"{name}-{kind}" / "checkpoint-1" for kind in ("at-once", "behind"))
        with tk.initialize(_plan(name, behind=True)) as run:
            _step(run, 1)
            asynchronous, run.plan = run.plan, _plan(name, behind=False)
            tk.save(run, at_once)
            run.plan = asynchronous
            heard: list[Path] = []
            run.on_save(lambda run, folder, heard=heard: heard.append(folder))
            tk.save(run, behind)
            run.world.barrier()
            absent = not behind.exists()
            run.world.barrier()
            told_early = bool(heard)
            _step_until_complete(run, behind)
            tk.save(run, behind.with_name("checkpoint-2"))
            tk.save(run, behind.with_name("checkpoint-3"))
            second = behind.with_name("checkpoint-2").exists()
            results[name] = (absent, told_early, heard[0] == behind, second)
        results[name] += (behind.with_name("checkpoint-3").exists(),)
    results["failure"] = _failure(rank, root / "failure")
    return results


def _failure(rank: int, root: Path) -> tuple[Any, ...]:
    """One rank's disk is full while the others write on."""
    with tk.initialize(_plan("zero-2-bf16", behind=True)) as run:
        _step(run, 1)
        tk.save(run, root / "checkpoint-1")
        run.finish_saving()
        write = os.pwrite

        def full(number: int, data: Any, at: int) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        files_module.os.pwrite = full if rank == 1 else write
        tk.save(run, root / "checkpoint-2")
        found, steps = (), 0
        try:
            while steps < 6000:
                steps += 1
                _step(run, steps)
                time.sleep(0.01)
        except RunError as error:
            found = error.codes
        finally:
            files_module.os.pwrite = write
        run.world.barrier()
        left = sorted(path.name for path in root.iterdir())
        tk.save(run, root / "checkpoint-3")
    return found, steps, left, (root / "checkpoint-3").exists()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("behind")


@pytest.fixture(scope="module")
def results(root: Path) -> list[dict[str, Any]]:
    return run_distributed(_all, 2, str(root), list(DEFAULT))


@pytest.fixture(scope="module")
def others(root: Path) -> list[dict[str, Any]]:
    return run_distributed(_all, 2, str(root / "others"), [name for name in CASES if name not in DEFAULT])


def _tensors(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        value = list(value.items())
    elif isinstance(value, list | tuple):
        value = list(enumerate(value))
    else:
        return {prefix: value}
    return {key: leaf for name, item in value for key, leaf in _tensors(item, f"{prefix}/{name}").items()}


def _contents(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".safetensors":
            found |= _tensors(load_file(path), path.name)
        elif path.suffix == ".pt":
            found |= _tensors(torch.load(path, weights_only=False), path.name)
    return found


@pytest.mark.parametrize("name", parameters(CASES, default=DEFAULT))
def test_what_is_written_is_what_was_there(request: pytest.FixtureRequest, root: Path, name: str) -> None:
    """Training changes every weight while it is written."""
    own = name in DEFAULT
    for result in request.getfixturevalue("results" if own else "others"):
        assert result[name] == (True, False, True, True, True)
    place = root if own else root / "others"
    at_once, behind = (place / f"{name}-{kind}" / "checkpoint-1" for kind in ("at-once", "behind"))
    verify(behind)
    wanted, found = _contents(at_once), _contents(behind)
    assert found.keys() == wanted.keys()
    assert len(wanted) > 20
    for key, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[key], value), key
    later = _contents(behind.with_name("checkpoint-2"))
    # Under other names of files the same tensors have changed.
    assert any(
        not torch.equal(value, later[key])
        for key, value in found.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and key in later
    )
    assert [path.name for path in behind.parent.iterdir() if path.name.startswith(".")] == []


def test_a_failure_is_one_error_on_all_ranks_at_a_step(results: list[dict[str, Any]]) -> None:
    (codes, steps, left, goes_on), other = (result["failure"] for result in results)
    assert (codes, steps) == other[:2]
    assert codes == ("DISK_FULL",)
    assert steps < 6000
    assert left == ["checkpoint-1"]
    assert goes_on
