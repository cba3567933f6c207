"""A run whose optimizer DeepSpeed cannot build goes on with torch's, or ends before its model is built; the builders are DeepSpeed's."""

from __future__ import annotations

import functools
import logging
import shutil
from pathlib import Path

import cpuinfo
import pytest
import torch
from tiny_plans import tiny_plan

import toolkit as tk
from toolkit.distributed.world import destroy_world, init_world
from toolkit.engine.extensions import build_extensions
from toolkit.errors import RunError

# Asked twice by each build, for a second.
CPU = functools.cache(cpuinfo.get_cpu_info)
OFFLOAD = {"zero_stage": 2, "offload": "optimizer-cpu", "offload_engine": "deepspeed"}


@pytest.fixture
def broken_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that is there, and compiles nothing."""
    compiler = tmp_path / "g++"
    compiler.write_text('#!/bin/sh\ncase "$*" in *-dumpfullversion*|*version*) echo 12.2.0; exit 0;; esac\n'
                        'echo "adam.cpp:1:10: fatal error: cuda.h: No such file or directory" >&2; exit 1\n')  # fmt: skip
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))


@pytest.fixture
def not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed has loaded nothing in this process before."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    monkeypatch.setattr(OpBuilder, "_loaded_ops", {})
    monkeypatch.setattr(cpuinfo, "get_cpu_info", CPU)


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.full)])
def test_torchs_fused_adamw_takes_the_place_of_one_whose_compilation_fails(
    broken_compiler: None, not_loaded: None, stage: int, caplog: pytest.LogCaptureFixture
) -> None:
    plan = tiny_plan(
        ranks=1, parallel={**OFFLOAD, "zero_stage": stage}, train={"optimizer": "adamw", "learning_rate": 1e-2}
    )
    with caplog.at_level(logging.WARNING, logger="toolkit"), tk.initialize(plan) as run:
        assert run.plan.job.train.optimizer == "adamw_torch_fused"
        said = [record.getMessage() for record in caplog.records if record.name.startswith("toolkit.")]
        assert said[0] == "compiling DeepSpeed's CPUAdam (minutes, the first time only)"
        assert (
            "torch's fused AdamW replaces DeepSpeed's CPUAdam, which cannot be built here: adam.cpp:1:10" in caplog.text
        )
        inner = run.engine.basic_optimizer
        assert type(inner) is torch.optim.AdamW
        assert all(group["fused"] for group in inner.param_groups)
        tokens = torch.arange(3, 35).view(2, 16)
        losses = [float(run.step([{"input_ids": tokens, "labels": tokens}] * 2)) for _ in range(3)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("case", ["a checkpoint", "an optimizer that torch lacks"])
def test_what_nothing_can_take_the_place_of_ends_the_run(
    broken_compiler: None, not_loaded: None, case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer = "adamw" if case == "a checkpoint" else "lion"
    plan = tiny_plan(ranks=1, parallel=OFFLOAD, train={"optimizer": optimizer})
    said: list[str] = []
    world = init_world(plan.grid, backend="gloo")
    try:
        with pytest.raises(RunError, match=r"whose compilation failed: adam.cpp:1:10") as caught:
            build_extensions(plan, world, may_replace=case != "a checkpoint", say=said.append)
    finally:
        destroy_world(world)
    assert caught.value.codes == ("BUILD_FAILED",)
    name = "adam" if case == "a checkpoint" else "lion"
    assert said == [f"compiling DeepSpeed's CPU{name.title()} (minutes, the first time only)"]
    if case != "a checkpoint":
        (tmp_path / "extensions" / f"cpu_{name}" / f"cpu_{name}.so").touch()
        with pytest.raises(RunError, match="BUILD_FAILED"):
            tk.initialize(plan)
        assert "compiling" not in caplog.text, "there is one of an earlier run"
        assert not torch.distributed.is_initialized(), "a notebook goes on"


def test_missing_tools_have_the_same_effect(tmp_path: Path, not_loaded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = tiny_plan(ranks=1, parallel=OFFLOAD, train={"optimizer": "adamw"})
    (tmp_path / "sh").symlink_to(shutil.which("sh"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.delenv("CXX", raising=False)
    world = init_world(plan.grid, backend="gloo")
    try:
        assert build_extensions(plan, world).job.train.optimizer == "adamw_torch_fused"
        with pytest.raises(RunError, match=r"no C\+\+ compiler"):
            build_extensions(plan, world, may_replace=False)
    finally:
        destroy_world(world)
