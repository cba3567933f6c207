"""Save and load with stages: exact, of the size foreseen, and of no other pipeline."""

from __future__ import annotations

import traceback
import zipfile
from pathlib import Path
from typing import Any

import pytest
from ranks import leave_group, run_distributed
from safetensors.torch import load_file
from tiny_plans import step_batches, tiny_plan

import toolkit as tk
from toolkit.checkpoint.manifest import verify
from toolkit.checkpoint.save import foreseen_bytes
from toolkit.distributed.deepspeed_private import sort_by_rank
from toolkit.errors import ToolkitError
from toolkit.planning.plan import Plan

pytestmark = pytest.mark.gloo

RANKS = 4
LORA = {"method": "lora", "lora": {"r": 4}, "learning_rate": 0.05}
SUMS = {"precision": "bf16", "gradient_accumulation_dtype": "fp32", "optimizer": "adamw_torch"}
DROPOUT = {"attention_dropout": 0.5}
INTERLEAVED = {"pipeline_schedule": "interleaved", "virtual_stages": 2}
# name: architecture, what the job says of parallel, options of train, of the config
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "sums-tied-1": ("llama-tied", {"zero_stage": 1}, SUMS, DROPOUT),
    "tensor-3": ("llama-tied", {"zero_stage": 3, "tensor": 2, "partition": [3, 1]}, {}, {"vocab_size": 61}),
}
REST: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "interleaved-2": ("llama", {"zero_stage": 2, **INTERLEAVED}, {"weight_decay": 0.1}, DROPOUT),
    "tied-2": ("llama-tied", {"zero_stage": 2}, {"precision": "bf16"}, DROPOUT),
    "sums-tied-3": ("llama-tied", {"zero_stage": 3, **INTERLEAVED}, SUMS, DROPOUT),
    "interleaved-tensor-1": ("llama", {"zero_stage": 1, "tensor": 2, **INTERLEAVED}, SUMS, {}),
    "four-stages-3": ("llama-tied", {"zero_stage": 3, "pipeline": 4}, {"precision": "bf16"}, {}),
    "gpt2-1": ("gpt2", {"zero_stage": 1}, {"weight_decay": 0.1}, {"attn_pdrop": 0.3}),
    "experts-2": ("mixtral", {"zero_stage": 2, "tensor": 2}, {}, {"num_local_experts": 4}),
    "offload-2": ("llama", {"zero_stage": 2, "offload": "optimizer-cpu"}, {"optimizer": "adamw_torch"}, {}),
    "lora-1": ("llama", {"zero_stage": 1}, LORA, {}),
    "lora-tensor-2": ("llama-tied", {"zero_stage": 2, "tensor": 2}, LORA, {}),
    "lora-interleaved-3": ("llama-tied", {"zero_stage": 3, **INTERLEAVED}, LORA, {}),
}


def _plan(name: str, **parallel: Any) -> Plan:
    architecture, own, train, config = (CASES | REST)[name]
    return tiny_plan(
        architecture,
        ranks=RANKS,
        parallel={"pipeline": 2, **own, **parallel},
        train={"gradient_accumulation_steps": 2 if "four" not in name else 4, **train},
        config={"num_hidden_layers": 4, **config},
    )


def _step(run: Any, step: int) -> tuple[float, float | None]:
    accumulation = run.plan.settings.batch.accumulation
    batches = step_batches(step, ranks=run.world.grid.dp, accumulation=accumulation)
    return float(run.step(batches[run.world.coordinate.dp])), run.gradient_norm


def _resume(name: str, folder: Path) -> dict[str, Any]:
    with tk.initialize(_plan(name)) as run:
        for step in (1, 2):
            _step(run, step)
        tk.save(run, folder, probe=name in CASES)
        expected = [_step(run, step) for step in (3, 4)]
        foreseen = foreseen_bytes(run)
    with tk.initialize(_plan(name)) as run:
        state = tk.load(run, folder)
        found = [_step(run, step) for step in (3, 4)]
    return {"step": state.step, "expected": expected, "found": found, "foreseen": foreseen}


def _refusal(plan: Plan, folder: Path) -> tuple[tuple[str, ...], str]:
    with tk.initialize(plan) as run:
        try:
            tk.load(run, folder, convert=False)
        except ToolkitError as error:
            return error.codes, str(error)
    return (), ""


def _all(rank: int, root: str, names: tuple[str, ...]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    leave_group()
    for name in names:
        try:
            results[name] = _resume(name, Path(root) / name)
        except Exception:  # reported by the test of this case; the ranks fail alike
            results[name] = traceback.format_exc()
    if "tensor-3" in names:
        results["refused"] = _refusal(_plan("tensor-3", partition=[2, 2]), Path(root) / "tensor-3")
    return results


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("save-pipeline")


@pytest.fixture(scope="module")
def results(root: Path) -> list[dict[str, Any]]:
    return run_distributed(_all, RANKS, str(root), tuple(CASES))


@pytest.fixture(scope="module")
def rest(root: Path) -> list[dict[str, Any]]:
    return run_distributed(_all, RANKS, str(root), tuple(REST))


@pytest.mark.parametrize("name", CASES)
def test_the_next_steps_are_equal(results: list[dict[str, Any]], root: Path, name: str) -> None:
    _assert_exact(results, root, name)


@pytest.mark.full
@pytest.mark.parametrize("name", REST)
def test_the_next_steps_of_the_rest_are_equal(rest: list[dict[str, Any]], root: Path, name: str) -> None:
    _assert_exact(rest, root, name)
    _assert_of_size(rest, root, name)


def _assert_exact(results: list[dict[str, Any]], root: Path, name: str) -> None:
    for result in results:
        assert isinstance(result[name], dict), result[name]
        assert result[name]["step"] == 2
        assert result[name]["found"] == result[name]["expected"]
        assert result[name]["expected"][0] != result[name]["expected"][1]
    held = set(verify(root / name))
    assert {f"random/rank-0000{rank}.pt" for rank in range(RANKS)} <= held
    grid = _plan(name).grid
    ranks = range(grid.size("model"))
    files = {f"global_step2/mp_rank_{rank:02d}_model_states.pt" for rank in ranks}
    if name.endswith("3"):
        parts = [(data, rank) for data in range(grid.dp) for rank in ranks]
        files = {f"global_step2/zero_pp_rank_{data}_mp_rank_{rank:02d}_model_states.pt" for data, rank in parts}
    assert files == {path for path in held if path.endswith("_model_states.pt")}


@pytest.mark.parametrize("name", CASES)
def test_its_size_over_all_ranks_is_foreseen(results: list[dict[str, Any]], root: Path, name: str) -> None:
    _assert_of_size(results, root, name)


def _assert_of_size(results: list[dict[str, Any]], root: Path, name: str) -> None:
    written = sum(_tensor_bytes(path) for path in (root / name / "global_step2").glob("*.pt"))
    [foreseen] = {result[name]["foreseen"] for result in results}
    assert 0.98 * foreseen < written < 1.02 * foreseen + 2_000, (written, foreseen)


def _tensor_bytes(path: Path) -> int:
    """Bytes of a file's tensors, without their names: of models so tiny these would be as much again."""
    with zipfile.ZipFile(path) as archive:
        return sum(entry.file_size for entry in archive.infolist() if "/data/" in entry.filename)


@pytest.mark.parametrize("name", CASES)
def test_the_last_stage_keeps_its_scores(results: list[dict[str, Any]], root: Path, name: str) -> None:
    probe = load_file(root / name / "probe.safetensors")
    assert probe["logits"].shape == (1, 16, 61 if name == "tensor-3" else 64)


def test_another_partition_is_refused_on_all_ranks_where_none_may_be_read(
    results: list[dict[str, Any]], root: Path
) -> None:
    folder = root / "tensor-3"
    for result in results:
        codes, message = result["refused"]
        assert codes == ("CHECKPOINT_LAYOUT",)
        assert f"{folder} has another layout (parallel.partition [3, 1] → [2, 2])" in message
        assert "Leave out --no-convert, or set parallel.partition to [3, 1]" in message


class _Files:
    """What DeepSpeed's engine finds: names in the order of the alphabet."""

    def _get_all_ckpt_names(self, folder: str, tag: str) -> list[str]:
        return sorted(f"{folder}/{tag}/mp_rank_{rank:02d}_model_states.pt" for rank in range(128))


def test_more_than_a_hundred_ranks_find_their_own_files() -> None:
    engine: Any = _Files()
    assert "_101_" in engine._get_all_ckpt_names("here", "tag")[11]
    sort_by_rank(engine)
    found = engine._get_all_ckpt_names("here", "tag")
    assert [name for rank, name in enumerate(found) if f"_{rank:02d}_model" not in name] == []
