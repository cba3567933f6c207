"""Save and load with tensor ranks: exact, of the size foreseen, and refused in another tensor size if that is asked for."""

from __future__ import annotations

import traceback
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from ranks import leave_group, run_distributed
from tiny_plans import step_batches, tiny_plan

import toolkit as tk
from toolkit.checkpoint.manifest import verify
from toolkit.checkpoint.save import foreseen_bytes
from toolkit.errors import PlanError, ToolkitError
from toolkit.planning.plan import Plan

pytestmark = pytest.mark.gloo

DROPOUT = {"attention_dropout": 0.5}
LORA = {"method": "lora", "lora": {"r": 4}, "learning_rate": 0.05}
# name: architecture, tensor ranks, stage, other options of the plan
CASES: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "zero-0": ("gpt2", 2, 0, {"config": {"attn_pdrop": 0.3, "resid_pdrop": 0.3}}),
    "zero-1-bf16": ("llama", 2, 1, {"train": {"precision": "bf16"}, "config": DROPOUT}),
    "zero-2": ("mixtral", 2, 2, {"train": {"weight_decay": 0.1}, "config": {"num_local_experts": 4}}),
    "zero-3": ("llama", 2, 3, {"config": {"vocab_size": 61, **DROPOUT}}),
    "zero-3-bf16": ("llama-tied", 4, 3, {"train": {"precision": "bf16"}}),
    "lora-1": ("llama", 2, 1, {"train": LORA}),
    "lora-3": ("llama", 4, 3, {"train": LORA}),
}


def _plan(name: str, *, tensor: int | None = None) -> Plan:
    architecture, own, stage, options = CASES[name]
    parallel = {"zero_stage": stage, "tensor": tensor or own}
    return tiny_plan(architecture, ranks=4, parallel=parallel, **options)


def _step(run: Any, step: int) -> tuple[float, float | None]:
    return float(run.step(step_batches(step)[run.world.coordinate.dp])), run.gradient_norm


def _resume(name: str, folder: Path) -> dict[str, Any]:
    with tk.initialize(_plan(name)) as run:
        for step in (1, 2):
            _step(run, step)
        tk.save(run, folder)
        expected = [_step(run, step) for step in (3, 4)]
        foreseen = foreseen_bytes(run)
    with tk.initialize(_plan(name)) as run:
        state = tk.load(run, folder)
        found = [_step(run, step) for step in (3, 4)]
        try:
            run.engine.save_16bit_model(str(folder / "16-bit"))
            told = "nothing"
        except PlanError as error:
            told = str(error)
    return {"step": state.step, "expected": expected, "found": found, "foreseen": foreseen, "16 bit": told}


def _refusal(plan: Plan, folder: Path) -> tuple[tuple[str, ...], str]:
    with tk.initialize(plan) as run:
        try:
            tk.load(run, folder, convert=False)
        except ToolkitError as error:
            return error.codes, str(error)
    return (), ""


def _some(rank: int, root: str, names: Iterable[str]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    leave_group()
    for name in names:
        try:
            results[name] = _resume(name, Path(root) / name)
        except Exception:  # reported by the test of this case; the ranks fail alike
            results[name] = traceback.format_exc()
    return results


def _all(rank: int, root: str, names: Iterable[str]) -> dict[str, Any]:
    results = _some(rank, root, names)
    results["refused"] = _refusal(_plan("zero-3", tensor=4), Path(root) / "zero-3")
    return results


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("save-tensor")


# By default weights over two tensor ranks.
DEFAULT = ("zero-3",)
EACH = [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.full) for name in CASES]


@pytest.fixture(scope="module")
def results(root: Path) -> list[dict[str, Any]]:
    return run_distributed(_all, 4, str(root), DEFAULT)


@pytest.fixture(scope="module")
def rest(root: Path) -> list[dict[str, Any]]:
    return run_distributed(_some, 4, str(root), [name for name in CASES if name not in DEFAULT])


@pytest.fixture
def results_of(request: pytest.FixtureRequest, name: str) -> list[dict[str, Any]]:
    return request.getfixturevalue("results" if name in DEFAULT else "rest")


@pytest.mark.parametrize("name", EACH)
def test_the_next_steps_are_equal(results_of: list[dict[str, Any]], root: Path, name: str) -> None:
    for result in results_of:
        assert isinstance(result[name], dict), result[name]
        assert result[name]["step"] == 2
        assert result[name]["found"] == result[name]["expected"]
        assert result[name]["expected"][0] != result[name]["expected"][1]
    held = set(verify(root / name))
    assert {f"random/rank-0000{rank}.pt" for rank in range(4)} <= held
    _, tensor, stage, _ = CASES[name]
    files = {f"global_step2/mp_rank_{rank:02d}_model_states.pt" for rank in range(tensor)}
    if stage == 3:
        parts = [(data, rank) for data in range(4 // tensor) for rank in range(tensor)]
        files = {f"global_step2/zero_pp_rank_{data}_mp_rank_{rank:02d}_model_states.pt" for data, rank in parts}
    assert files == {path for path in held if path.endswith("_model_states.pt")}


@pytest.mark.parametrize("name", EACH)
def test_no_shard_is_written_under_the_name_of_a_whole_weight(
    results_of: list[dict[str, Any]], root: Path, name: str
) -> None:
    """By DeepSpeed's own `save_16bit_model`, which writes what rank 0 has; `tk.export` joins the shards."""
    for result in results_of:
        assert "save_16bit_model of " in result[name]["16 bit"]
        assert result[name]["16 bit"].endswith("[PART_SAVE]")
    assert not (root / name / "16-bit").exists()


@pytest.mark.parametrize("name", EACH)
def test_its_size_over_all_ranks_is_foreseen(results_of: list[dict[str, Any]], root: Path, name: str) -> None:
    written = sum(_tensor_bytes(path) for path in (root / name / "global_step2").glob("*.pt"))
    foreseen = results_of[0][name]["foreseen"]
    assert 0.98 * foreseen < written < 1.02 * foreseen + 2_000, (written, foreseen)


def _tensor_bytes(path: Path) -> int:
    """Bytes of a file's tensors, without their names: of models so tiny these would be as much again."""
    with zipfile.ZipFile(path) as archive:
        return sum(entry.file_size for entry in archive.infolist() if "/data/" in entry.filename)


def test_another_tensor_size_is_refused_on_all_ranks_where_none_may_be_read(
    results: list[dict[str, Any]], root: Path
) -> None:
    for result in results:
        codes, message = result["refused"]
        # Twice the tensor ranks of as many ranks are half the replicas, and half the batch.
        assert codes == ("CHECKPOINT_DATA", "CHECKPOINT_LAYOUT")
        assert f"{root / 'zero-3'} has another layout (parallel.tensor 2 → 4)" in message
