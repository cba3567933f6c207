"""A job with `precision: fp8` from its file to its export, on two real ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_distributed
from safetensors.torch import load_file
from train_jobs import curve, job_values, records, write_inputs
from transformers import AutoModelForCausalLM

import toolkit as tk
from toolkit.checkpoint.layout import PROBE
from toolkit.config.job import Job
from toolkit.errors import ToolkitError
from toolkit.exporter.checkpoint import logits_difference
from toolkit.modeling.build import build_model
from toolkit.modeling.fp8 import fp8_layers
from toolkit.planning.plan import Plan
from toolkit.planning.resolve import resolve
from toolkit.trainer.loop import train
from toolkit.trainer.metrics import Meter
from toolkit.trainer.progress import Silent

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_key_value_heads": 4}
FP8 = {"precision": "fp8", "learning_rate": 3e-3}
HELD_OUT = {"validation_fraction": 0.25}


def _plan(root: Path, name: str, **sections: Any) -> Plan:
    sections = {"data": HELD_OUT, **sections, "train": FP8 | sections.get("train", {})}
    return resolve(Job.model_validate(job_values(root, name, **sections)))


def _run(root: Path, name: str, resume: str | None = None, stop_after: int | None = None, **sections: Any) -> Any:
    folder = None if resume is None else root / name / resume
    try:
        return train(_plan(root, name, **sections), resume=folder, stop_after=stop_after, reporter=Silent())
    except ToolkitError as error:
        return error.codes


def _in_parts(rank: int, root_name: str, stages: tuple[int, ...]) -> dict[str, Any]:
    root, results = Path(root_name), {}
    for stage in stages:
        parallel = {"zero_stage": stage}
        if stage != 2:
            results[f"whole-{stage}"] = _run(root, f"whole-{stage}", parallel=parallel)
        results[f"first-{stage}"] = _run(root, f"parts-{stage}", stop_after=3, parallel=parallel)
        results[f"second-{stage}"] = _run(root, f"parts-{stage}", resume="checkpoint-3", parallel=parallel)
    return results


def _all_runs(rank: int, root_name: str) -> dict[str, Any]:
    root = Path(root_name)
    results: dict[str, Any] = {"whole-2": _run(root, "whole-2", parallel={"zero_stage": 2})}
    results["bf16"] = _run(root, "bf16", stop_after=4, train={"precision": "bf16"})
    results["from-bf16"] = _run(root, "bf16", resume="checkpoint-4")
    results["fp32"] = _run(root, "whole-2", resume="checkpoint-4", train={"precision": "fp32"})
    results["lora"] = _run(root, "lora", train={"method": "lora", "lora": {"r": 4}, "gradient_checkpointing": True})
    return results


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("fp8"), architecture="llama", **SIZES)


@pytest.fixture(scope="module")
def results(root: Path) -> dict[str, Any]:
    first, second = run_distributed(_all_runs, 2, str(root))
    assert first == second
    return first


@pytest.fixture(scope="module")
def in_parts(root: Path, results: dict[str, Any]) -> dict[str, Any]:
    """Runs that stopped and went on, and the whole one of stage 3."""
    return results | run_distributed(_in_parts, 2, str(root), (2, 3))[0]


@pytest.fixture
def results_of(request: pytest.FixtureRequest, stage: int) -> dict[str, Any]:
    return request.getfixturevalue("results" if stage == 2 else "in_parts")


STAGES = [2, pytest.param(3, marks=pytest.mark.full)]


@pytest.mark.gloo
@pytest.mark.full
@pytest.mark.parametrize("stage", [2, 3])
def test_a_resumed_run_is_the_uninterrupted_one(root: Path, in_parts: dict[str, Any], stage: int) -> None:
    whole, parts = (curve(root / f"{name}-{stage}") for name in ("whole", "parts"))
    assert parts == whole
    assert in_parts[f"second-{stage}"].step == 8


@pytest.mark.gloo
@pytest.mark.parametrize("stage", STAGES)
def test_a_run_learns_in_fp8(root: Path, results_of: dict[str, Any], stage: int) -> None:
    losses = [loss for loss, _, _ in curve(root / f"whole-{stage}").values()]
    assert len(losses) == results_of[f"whole-{stage}"].step == 8
    assert losses[0] - losses[-1] > 0.05
    plan = json.loads((root / f"whole-{stage}" / "checkpoint-8" / "plan.json").read_text())
    assert plan["settings"]["precision"] == "fp8"


@pytest.mark.gloo
def test_bf16_goes_on_in_fp8_and_fp32_does_not(root: Path, results: dict[str, Any]) -> None:
    assert results["from-bf16"].step == 8
    assert results["fp32"] == ("CHECKPOINT_LAYOUT",)
    mixed, whole = curve(root / "bf16"), curve(root / "whole-2")
    assert mixed[1] != whole[1]
    for step, (loss, _, _) in mixed.items():
        assert loss == pytest.approx(whole[step][0], abs=0.03), "float8 follows bf16"


@pytest.mark.gloo
def test_validation_is_that_of_the_trained_model(root: Path, results: dict[str, Any]) -> None:
    (found,) = {
        record["eval_loss"] for record in records(root / "whole-2") if "eval_loss" in record and record["step"] == 8
    }
    assert found == pytest.approx(curve(root / "whole-2")[8][0], abs=0.3)


@pytest.mark.gloo
@pytest.mark.parametrize("stage", STAGES)
def test_the_export_is_the_bf16_model(root: Path, results_of: dict[str, Any], tmp_path: Path, stage: int) -> None:
    checkpoint = root / f"whole-{stage}" / "checkpoint-8"
    done = tk.export(checkpoint, tmp_path / "export", check_logits=True)
    assert done.logits_difference < 0.01, "compared in bf16, whatever rounding the training had"
    files = [load_file(path) for path in sorted((tmp_path / "export").glob("*.safetensors"))]
    tensors = {name: value for part in files for name, value in part.items()}
    plain = build_model(
        _plan(root, "x", train={"precision": "bf16"}, parallel={"zero_stage": 0}), device=torch.device("cpu")
    )
    assert set(tensors) == set(plain.state_dict())
    assert {value.dtype for value in tensors.values()} == {torch.bfloat16}
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.bfloat16).eval()
    assert logits_difference(reloaded, checkpoint / PROBE) == done.logits_difference
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert "quantization_config" not in config
    in_fp8 = build_model(
        _plan(root, "x", parallel={"zero_stage": 0}), device=torch.device("cpu"), weights=tmp_path / "export"
    )
    assert len(list(fp8_layers(in_fp8))) == 14
    assert logits_difference(in_fp8.eval(), checkpoint / PROBE) > 2 * done.logits_difference, (
        "float8 is no part of an export"
    )


@pytest.mark.gloo
def test_an_adapter_is_trained_and_merged(root: Path, results: dict[str, Any], tmp_path: Path) -> None:
    assert results["lora"].step == 8
    done = tk.export(root / "lora" / "checkpoint-8", tmp_path / "merged", merge_adapter=True, check_logits=True)
    assert done.logits_difference < 0.02


def test_utilisation_is_measured_against_the_rate_of_fp8(root: Path) -> None:
    def meter(precision: str) -> Any:
        values = job_values(root, "mfu", cluster={"gpu": "h100-sxm-80gb"}, train={"precision": precision})
        return Meter(resolve(Job.model_validate(values)), None)  # type: ignore[arg-type]

    assert meter("fp8")._peak_flops == pytest.approx(2 * meter("bf16")._peak_flops, rel=1e-3)
