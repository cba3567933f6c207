"""The NVMe profiles on two real ranks: the same numbers as without offload, through save, resume and export."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile_files import agree, make_hostile
from ranks import run_distributed
from tiny_models import tiny_config
from tiny_plans import step_batches
from transformers import AutoModelForCausalLM

import toolkit as tk
from toolkit.checkpoint.nvme_state import INDEX, SWAPPED, restore_unswapped
from toolkit.config.job import Job
from toolkit.errors import CheckpointError
from toolkit.exporter.zero_reader import ZeroCheckpoint
from toolkit.planning.plan import Plan
from toolkit.planning.resolve import resolve


def _is_built(name: str) -> bool:
    """Whether DeepSpeed has compiled an extension for this very torch; async_io takes minutes, and anew for another."""
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR", Path.home() / ".cache" / "torch_extensions"))
    torch_folder = str(Path(torch.__file__).parent)
    return any(
        torch_folder in (library.parent / "build.ninja").read_text(encoding="utf-8")
        for library in root.glob(f"**/{name}/{name}.so")
        if (library.parent / "build.ninja").exists()
    )


pytestmark = [
    pytest.mark.gloo,
    pytest.mark.skipif(
        not _is_built("async_io"),
        reason="compile it first: python -c 'from deepspeed.ops.op_builder import AsyncIOBuilder as B; B().load()'",
    ),
]

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "optimizer-nvme": ("optimizer-nvme", {}),
    # Without it the first 1e9 parameters of a rank stay in memory, so of this model all.
    "full-nvme": ("full-nvme", {"zero_optimization": {"offload_param": {"max_in_cpu": 0}}}),
}


def _plan(root: Path, case: str) -> Plan:
    """Eight weights are large enough to be swapped (1 MiB a rank), more than there are buffers; the norms are not."""
    offload, deepspeed = CASES.get(case, ("none", {}))
    job = {
        "model": str(root / "model"),
        "cluster": {"gpu": "cpu", "gpus_per_node": 2, "nvme_path": str(root)},
        "train": {
            "precision": "fp32",
            "sequence_length": 16,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "max_steps": 10,
            "learning_rate": 1e-3,
            "weight_decay": 0.1,
            "optimizer": "adamw_torch",
            "lr_scheduler_type": "constant",
        },
        "parallel": {"zero_stage": 3, "offload": offload},
        "deepspeed": deepspeed,
    }
    return resolve(Job.model_validate(job))


def _all(rank: int, root: str) -> dict[str, Any]:
    return {case: _one(rank, Path(root), case) for case in ("none", *CASES)}


def _one(rank: int, root: Path, case: str) -> dict[str, Any]:
    """Four steps with a save after the second; with offload a new engine then goes on from there."""
    plan = _plan(root, case)

    def step(run: Any, number: int) -> tuple[float, float]:
        loss = run.step(step_batches(number)[rank])
        return float(loss), run.gradient_norm or 0.0

    with tk.initialize(plan) as run:
        on_disk = any(flat is None for flat in run.engine.optimizer.fp16_partitioned_groups_flat)
        first = [step(run, number) for number in (1, 2)]
        if case == "none":
            then = [step(run, number) for number in (3, 4)]
            tk.save(run, root / case)
            return {"first": first, "then": then}
        tk.save(run, root / case)
        then = [step(run, number) for number in (3, 4)]
    with tk.initialize(plan) as run:
        tk.load(run, root / case)
        again = [step(run, number) for number in (3, 4)]
        tk.save(run, root / case)  # in place of what is there
        refused = _refusals(run, rank, root, case)
    return {"first": first, "then": then, "again": again, "on_disk": on_disk, "refused": refused}


def _refusals(run: Any, rank: int, root: Path, case: str) -> list[tuple[str, ...]]:
    """What is said to a pickle that calls a function, by `tk.load` and by the part of it that only these profiles have."""
    hostile, refused = root / f"{case}-hostile", []
    if rank == 0:
        shutil.copytree(root / case, hostile)
        for path in hostile.glob("global_step4/*_optim_states.pt"):
            make_hostile(path, root / "called")
        agree(hostile)
    run.world.barrier()
    for call in (lambda: tk.load(run, hostile), lambda: restore_unswapped(run.engine, hostile, "global_step4")):
        try:
            call()
        except CheckpointError as error:
            refused.append(error.codes)
    return refused


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nvme")


@pytest.fixture(scope="module")
def results(root: Path) -> list[dict[str, Any]]:
    config = tiny_config("llama", vocab_size=2048, hidden_size=256, intermediate_size=2048)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(root / "model")
    return run_distributed(_all, 2, str(root), timeout_seconds=900)  # the first run compiles async_io


@pytest.mark.parametrize("case", CASES)
def test_offload_changes_no_number(results: list[dict[str, Any]], case: str) -> None:
    for result in results:
        for part in ("first", "then"):
            assert torch.tensor(result[case][part]) == pytest.approx(torch.tensor(result["none"][part]), rel=1e-5)
        assert result[case]["first"][0] != result[case]["first"][1]
        assert result[case]["on_disk"] == (case == "full-nvme")


@pytest.mark.parametrize("case", CASES)
def test_a_resume_goes_on_exactly(results: list[dict[str, Any]], case: str) -> None:
    for result in results:
        assert result[case]["again"] == result[case]["then"]


@pytest.mark.parametrize("case", CASES)
def test_nothing_of_a_checkpoint_runs(results: list[dict[str, Any]], root: Path, case: str) -> None:
    for result in results:
        assert result[case]["refused"] == [("CHECKPOINT_UNSAFE",) * 2, ("CHECKPOINT_UNSAFE",)]
    assert not (root / "called").exists()


@pytest.mark.parametrize("case", CASES)
def test_the_master_weights_are_read_from_swap_files(results: list[dict[str, Any]], root: Path, case: str) -> None:
    folder = root / case / "global_step4"
    groups = json.loads((folder / SWAPPED / INDEX).read_text())
    assert {group["file"] is None for group in groups} == {True, False}, "both kinds of sub-group are tried"
    plain, swapped = ZeroCheckpoint(root / "none" / "global_step4"), ZeroCheckpoint(folder)
    assert swapped.tensors.keys() == plain.tensors.keys()
    for name in plain.tensors:
        torch.testing.assert_close(
            swapped.read(name, torch.float32), plain.read(name, torch.float32), rtol=1e-4, atol=1e-5
        )


def test_swap_files_without_their_index_are_refused(results: list[dict[str, Any]], root: Path) -> None:
    folder = root / "optimizer-nvme" / "global_step4"
    (folder / SWAPPED / INDEX).rename(root / "index")
    try:
        with pytest.raises(CheckpointError) as caught:
            ZeroCheckpoint(folder)
    finally:
        (root / "index").rename(folder / SWAPPED / INDEX)
    assert caught.value.codes == ("EXPORT_NVME",)


def test_a_missing_swap_file_is_named(results: list[dict[str, Any]], root: Path) -> None:
    folder = root / "optimizer-nvme" / "global_step4"
    file = next((folder / SWAPPED / "rank01").glob("[0-9]*.swp"))
    file.rename(root / "away")
    try:
        with pytest.raises(CheckpointError, match=file.name) as caught:
            ZeroCheckpoint(folder)
    finally:
        (root / "away").rename(file)
    assert caught.value.codes == ("EXPORT_DAMAGED",)
