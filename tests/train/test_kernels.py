"""Whether a run will compile one of DeepSpeed's kernels first."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_plans import tiny_plan

from toolkit.train.kernels import kernel_to_compile

OFFLOAD = {"parallel": {"zero_stage": 2, "offload": "optimizer-cpu"}}


def test_a_kernel_that_is_not_there_is_named(tmp_path: Path) -> None:
    environment = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    plan = tiny_plan(**OFFLOAD)
    (tmp_path / "cpu_adam").mkdir()
    assert kernel_to_compile(plan, environment) == "CPUAdam", "a folder alone is a compilation that was broken off"
    (tmp_path / "cpu_adam" / "cpu_adam.so").touch()
    assert kernel_to_compile(plan, environment) is None


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_torch", "sgd"])
def test_torch_optimizers_need_none(tmp_path: Path, optimizer: str) -> None:
    assert kernel_to_compile(tiny_plan(train={"optimizer": optimizer}), {"TORCH_EXTENSIONS_DIR": str(tmp_path)}) is None
