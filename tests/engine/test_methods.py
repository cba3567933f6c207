"""QLoRA trains as one process of plain torch with bitsandbytes' own layers does, resumes exactly, and exports what it trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from courses import (
    ADAM,
    ADAPTERS,
    BF16,
    CLOSE,
    NEAR,
    SGD,
    Case,
    arguments_of,
    assert_follows_plain_torch,
    parameters,
    train_all,
)
from ranks import run_distributed
from safetensors.torch import load_file
from tiny_models import tiny_model

import toolkit as tk
from tests.engine.test_torch_engine import save_and_resume
from toolkit.errors import CheckpointError
from toolkit.planning.plan import Plan

RANKS = 2
QLORA = ADAPTERS | {"method": "qlora"}
ROUNDED = SGD | QLORA | BF16 | {"learning_rate": 0.5, "max_grad_norm": 0.1}
COMPILED = {"torch_compile": True, "gradient_checkpointing": 0.5, "loss": "chunked", "max_grad_norm": 0.1}
STRATEGIES: dict[str, dict[str, Any]] = {"zero": {"stage": 2}, "ddp": {}, "fsdp2": {}}
# A random number in bf16 is off by up to 2**-9 of it.
IN_BF16 = NEAR | {"weight_tolerance": 8e-3}


def cases() -> dict[str, Case]:
    made: dict[str, Case] = {}
    for strategy, of in STRATEGIES.items():
        of = {"strategy": strategy, **of}
        made[f"qlora {strategy}"] = Case(train=ADAM | QLORA, steps=10, **of, **CLOSE)
        made[f"bf16 {strategy}"] = Case(train=ROUNDED, steps=6, **of, **IN_BF16)
        made[f"compiled {strategy}"] = Case(train=SGD | QLORA | {"learning_rate": 0.2} | COMPILED, **of)
    for stage in (0, 1):
        made[f"qlora zero {stage}"] = Case(train=ADAM | QLORA, steps=10, stage=stage, **CLOSE)
    return made


CASES = cases()
DEFAULT = tuple(f"qlora {strategy}" for strategy in STRATEGIES)


def plan_of(folder: Path, strategy: str, **train: Any) -> Plan:
    """Resolves a job on weights that are read."""
    learning = {"precision": "fp32", "learning_rate": 1e-2, "lr_scheduler_type": "linear", "max_steps": 10}
    batch = {"sequence_length": 16, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    job = {
        "model": str(folder),
        "cluster": {"gpu": "cpu", "gpus_per_node": RANKS},
        "train": learning | batch | {"optimizer": "adamw_torch"} | train,
        "parallel": {"strategy": strategy, **({"zero_stage": 2} if strategy == "zero" else {})},
    }
    return tk.resolve(tk.Job.model_validate(job))


def run_all(rank: int, courses: Any, plans: dict[str, Plan], folder: Path) -> tuple[Any, Any]:
    return train_all(rank, courses), save_and_resume(rank, plans, folder)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """The checkpoints of each strategy, and what each rank found."""
    folder = tmp_path_factory.mktemp("saved")
    tiny_model("llama").save_pretrained(folder / "model")
    plans = {strategy: plan_of(folder / "model", strategy, **QLORA) for strategy in STRATEGIES}
    courses = arguments_of({name: CASES[name] for name in DEFAULT})
    return folder, run_distributed(run_all, RANKS, courses, plans, folder)


@pytest.fixture(scope="module")
def others() -> list[dict[str, Any]]:
    chosen = {name: case for name, case in CASES.items() if name not in DEFAULT}
    return run_distributed(train_all, RANKS, arguments_of(chosen), timeout_seconds=900)


@pytest.mark.gloo
@pytest.mark.parametrize("name", parameters(CASES, default=DEFAULT))
def test_follows_plain_torch(name: str, request: pytest.FixtureRequest) -> None:
    ranks = (
        [courses for courses, _ in request.getfixturevalue("found")[1]]
        if name in DEFAULT
        else request.getfixturevalue("others")
    )
    assert_follows_plain_torch(CASES[name], [rank[name] for rank in ranks])


@pytest.mark.gloo
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_qlora_resumes_exactly_and_exports_adapter_and_merged_weights(
    strategy: str, found: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    folder, ranks = found
    own = ranks[0][1][strategy]
    assert own["resumed"] == own["straight"]
    adapter = tk.export(folder / strategy, tmp_path / "adapter")
    values = load_file(adapter.folder / "adapter_model.safetensors")
    trained = {key.replace(".default", ""): value for key, value in own["weights"].items()}
    assert values.keys() == trained.keys()
    assert all(torch.equal(values[key], torch.from_numpy(value)) for key, value in trained.items())
    merged = tk.export(folder / strategy, tmp_path / "merged", merge_adapter=True)
    for export in (adapter, merged):  # against the live model's scores
        assert export.logits_difference is not None
        assert export.logits_difference < 1e-5
    names = [name for file in (folder / strategy).rglob("*.safetensors") for name in load_file(file)]
    assert not [name for name in names if "base_layer" in name or "absmax" in name]


def test_packed_weights_of_a_base_that_is_drawn_are_nowhere_to_merge_into(
    found: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    from toolkit.exporter.export import export_checkpoint

    with pytest.raises(CheckpointError) as caught:
        export_checkpoint(found[0] / "ddp", tmp_path / "out", merge_adapter=True, packed=True)
    assert caught.value.codes == ("EXPORT_ADAPTER_BASE",)
