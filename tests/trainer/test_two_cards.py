"""Runs of two cards over NCCL stop, resume to the same losses and export what they trained."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from cards import card
from train_jobs import curve, run_toolkit, write_inputs, write_job

LORA: dict[str, Any] = {"method": "lora", "lora": {"r": 8}}
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "tensor": {"parallel": {"tensor": 2, "zero_stage": 1}},
    "tensor, LoRA": {"parallel": {"tensor": 2, "zero_stage": 1}, "train": LORA},
    "pipeline": {"parallel": {"pipeline": 2, "zero_stage": 1}},
    "pipeline in fp16": {"parallel": {"pipeline": 2, "zero_stage": 1}, "train": {"precision": "fp16"}},
    "interleaved, compiled, Liger": {
        "parallel": {"pipeline": 2, "zero_stage": 1, "pipeline_schedule": "interleaved", "virtual_stages": 2},
        "train": {"torch_compile": True, "loss": "liger"},
    },
    "zb-h1 with Liger's kernels": {
        "parallel": {"pipeline": 2, "zero_stage": 1, "pipeline_schedule": "zb-h1"},
        "train": {"kernels": "liger"},
    },
    "ZeRO-2, reduced beside": {"parallel": {"zero_stage": 2}},
    "optimizer on the host": {"parallel": {"zero_stage": 2, "offload": "optimizer-cpu"}},
    "ZeRO-3": {"parallel": {"zero_stage": 3}},
    "ZeRO++": {
        "parallel": {"zero_stage": 3},
        "deepspeed": {"zero_optimization": {"zero_quantized_weights": True, "zero_quantized_gradients": True}},
    },
    "ZeRO-3 in fp8": {"parallel": {"zero_stage": 3}, "train": {"precision": "fp8"}},
    "DDP, PowerSGD": {
        "parallel": {
            "strategy": "ddp",
            "zero_stage": None,
            "ddp": {"comm_hook": "power_sgd", "power_sgd_start_step": 2},
        }
    },
    "FSDP2": {"parallel": {"strategy": "fsdp2", "zero_stage": None}},
    "FSDP2 on the host": {"parallel": {"strategy": "fsdp2", "zero_stage": None, "fsdp2": {"cpu_offload": True}}},
}
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
AT_ONCE = 6  # jobs, each of two processes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(
        tmp_path_factory.mktemp("two-cards"), architecture="llama", num_key_value_heads=2, head_dim=64, **SIZES
    )


@pytest.fixture(scope="module")
def outcomes(root: Path) -> dict[str, list[Any]]:
    """What each of a case's runs printed and returned: the whole one, the one that stops, and the one that goes on."""

    def train(name: str) -> list[Any]:
        folder = name.replace(" ", "-").replace(",", "").replace("'", "")
        sections = dict(CASES[name])
        here = {"cluster": {"gpu": card(), "gpus_per_node": 2, "host_memory_gib": 64}}
        jobs = [write_job(root, f"{folder}-{part}", **here, **sections) for part in ("whole", "cut")]
        each: list[tuple[Any, ...]] = [(jobs[0],), (jobs[1], "--stop-after", "4"), (jobs[1], "--resume", "latest")]
        runs = [run_toolkit(root, "train", *words, "--as-is", python=sys.executable) for words in each]
        return [root / f"{folder}-whole", root / f"{folder}-cut", *runs]

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(CASES, pool.map(train, CASES), strict=True))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_a_run_goes_on_as_if_it_had_not_stopped_and_exports(outcomes: dict[str, list[Any]], name: str) -> None:
    whole, cut, *runs = outcomes[name]
    for run in runs:
        assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    assert (whole / "export" / "config.json").exists() or (whole / "export" / "adapter_config.json").exists()
    expected, found = curve(whole), curve(cut)
    assert expected.keys() == found.keys() == set(range(1, 9))
    for step, (loss, norm, rate) in expected.items():
        assert found[step][0] == pytest.approx(loss, rel=2e-3), step
        assert found[step][1] == pytest.approx(norm, rel=2e-2), step
        assert found[step][2] == rate
    assert expected[8][0] < expected[1][0]


@pytest.mark.timeout(600)
def test_quantized_weights_and_gradients_train_as_whole_ones_do(outcomes: dict[str, list[Any]]) -> None:
    quantized, whole = (curve(outcomes[name][0]) for name in ("ZeRO++", "ZeRO-3"))
    for step, (loss, norm, _) in whole.items():
        assert quantized[step][0] == pytest.approx(loss, rel=1e-2), step
        assert quantized[step][1] == pytest.approx(norm, rel=0.1), step
    assert [row[0] for row in quantized.values()] != [row[0] for row in whole.values()]
