"""metrics.jsonl, TensorBoard and the numbers in them."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_plans import tiny_plan

from toolkit.catalog.parameters import BackwardShares
from toolkit.config.job import Job
from toolkit.engine.memory_tracker import PhaseMemoryTracker
from toolkit.errors import RunError
from toolkit.planning.plan import Plan
from toolkit.planning.unchecked_plan import flops_per_token
from toolkit.trainer.metrics import Meter, MetricsWriter


def _plan(folder: Path, **train: Any) -> Plan:
    return tiny_plan(train={"output_dir": str(folder), **train})


def _lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=_refuse) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _refuse(word: str) -> None:
    raise AssertionError(f"{word} is not a JSON")


def test_one_object_a_line_at_once(tmp_path: Path) -> None:
    writer = MetricsWriter(_plan(tmp_path / "run"), resumed_step=0)
    writer.write({"step": 1, "loss": 2.5})
    assert _lines(tmp_path / "run") == [{"step": 1, "loss": 2.5}], "not only when the file is closed"
    writer.write({"step": 2, "loss": 2.25})
    writer.close()
    writer.close()
    assert [record["step"] for record in _lines(tmp_path / "run")] == [1, 2]


def test_what_is_no_number_is_null(tmp_path: Path) -> None:
    writer = MetricsWriter(_plan(tmp_path), resumed_step=0)
    writer.write({"step": 1, "loss": math.nan, "grad_norm": math.inf, "mfu": None})
    writer.close()
    assert _lines(tmp_path) == [{"step": 1, "loss": None, "grad_norm": None, "mfu": None}]


def test_a_resume_drops_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    text = '{"step": 1, "loss": 1}\n{"step": 2, "loss": 2}\n{"step": 2, "eval_loss": 2}\n{"step": 3, "loss": 3}\n{"ste'
    (tmp_path / "metrics.jsonl").write_text(text)
    writer = MetricsWriter(_plan(tmp_path), resumed_step=2)
    writer.write({"step": 3, "loss": 4})
    writer.close()
    assert [tuple(record.values()) for record in _lines(tmp_path)] == [(1, 1), (2, 2), (2, 2), (3, 4)]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_full_disk_is_named() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    writer = MetricsWriter.__new__(MetricsWriter)
    writer.path, writer._file = full, full.open("a")
    with pytest.raises(RunError) as caught:
        writer.write({"step": 1})
    assert caught.value.codes == ("DISK_FULL",)
    writer.close()


def test_throughput_counts_between_readings(tmp_path: Path) -> None:
    meter = Meter(_plan(tmp_path), PhaseMemoryTracker(torch.device("cpu")))
    time.sleep(0.2)
    began = time.perf_counter()
    meter.skip()  # an evaluation
    time.sleep(0.1)
    found = meter.read(1000, 2)
    assert 0.099 <= 1000 / found["tokens_per_second"] <= 1.001 * (time.perf_counter() - began)
    assert math.isclose(found["step_seconds"], 500 / found["tokens_per_second"])
    assert found["mfu"] is None, "no peak rate is known of a CPU"
    # The process may have grown since.
    assert found["peak_allocated_bytes"] == pytest.approx(PhaseMemoryTracker(torch.device("cpu")).peak_bytes, rel=0.01)
    assert found["peak_allocated_bytes"] > 50 * 2**20


def _gpu_plan(model: str, **train: Any) -> Plan:
    from toolkit.planning.resolve import resolve

    job = {"model": model, "cluster": {"gpu": "h100-sxm-80gb", "gpus_per_node": 8}, "parallel": {"zero_stage": 3}}
    return resolve(Job.model_validate(job | {"train": {"sequence_length": 4096, "max_steps": 5, **train}}))


ATTENTION_8B = 6 * 32 * 32 * 128 * 4096


def test_model_flops_utilization() -> None:
    """Llama 3.1 8B: 6 × 7.5 B parameters without the embedding table, and 6 · 32 · 4096 · 4096 for causal attention."""
    plan = _gpu_plan("llama-3.1-8b")
    assert flops_per_token(plan) == 6 * (8_030_261_248 - 128_256 * 4096) + ATTENTION_8B
    meter = Meter(plan, PhaseMemoryTracker(torch.device("cpu")))
    time.sleep(0.05)
    found = meter.read(1000, 1)
    peak = plan.gpu.flops_per_second("bf16") * 8
    assert math.isclose(found["mfu"], found["tokens_per_second"] * flops_per_token(plan) / peak)


def test_flops_of_a_tied_table_count_once_as_the_head() -> None:
    plan = _gpu_plan("llama-3.2-1b")
    assert flops_per_token(plan) == 6 * 1_235_814_400 + 6 * 16 * 32 * 64 * 4096


def test_flops_of_lora_and_of_experts() -> None:
    full, lora = (_gpu_plan("llama-3.1-8b", method=method) for method in ("full", "lora"))
    assert flops_per_token(full) - flops_per_token(lora) == 2 * (8_030_261_248 - 128_256 * 4096)
    assert flops_per_token(lora, adapters=1_000_000) - flops_per_token(lora) == 6_000_000
    # mistralai: 12.9 B of the 46.7 B parameters are used by a token, 0.13 B of them its embedding table.
    mixtral = flops_per_token(_gpu_plan("mixtral-8x7b"))
    assert math.isclose((mixtral - ATTENTION_8B) / 6, 12.75e9, rel_tol=0.005)
    # deepseek-ai: 2.4 B of 15.7 B are active, the shared experts and the dense first layer among them.
    lite = flops_per_token(_gpu_plan("deepseek-v2-lite"))
    attention = 6 * 27 * 16 * 192 * 4096
    assert math.isclose((lite - attention) / 6, 2.66e9 - 102_400 * 2048, rel_tol=0.02)


def test_flops_of_frozen_weights_and_below_the_first_trained_layer() -> None:
    plan = _gpu_plan("llama-3.1-8b")
    active = 8_030_261_248 - 128_256 * 4096
    layers = [f"model.layers.{index}.mlp.down_proj.weight" for index in range(4)]
    of = [("model.embed_tokens.weight", 50, False), *((name, 10, name == layers[2]) for name in layers)]
    shares = BackwardShares.of([*of, ("model.norm.weight", 0, False), ("lm_head.weight", 60, False)])
    assert (shares.inputs, shares.weights, shares.layers) == (0.8, 0.1, 0.5)
    assert flops_per_token(plan, backward=shares) == pytest.approx(2 * active * (1 + 0.8 + 0.1) + ATTENTION_8B * 2 / 3)
    embedding = BackwardShares.of([("model.embed_tokens.weight", 50, True), *((name, 10, False) for name in layers)])
    assert (embedding.inputs, embedding.weights, embedding.layers) == (1.0, 0.0, 1.0)


def test_flops_of_an_undeclared_architecture_are_unknown() -> None:
    plan = _gpu_plan("llama-3.1-8b")
    foreign = json.dumps({**plan.model.config, "model_type": "not_declared"})
    assert flops_per_token(replace(plan, model=replace(plan.model, config_json=foreign))) is None
