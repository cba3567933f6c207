"""Builds in a process of their own, by DeepSpeed's builder and a compiler that is there and compiles nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_plans import tiny_plan

from toolkit.launch.builds import main


@pytest.mark.full
def test_a_script_of_another_engine_is_told_before_its_launcher_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text('#!/bin/sh\ncase "$*" in *version*) echo 12.2.0; exit 0;; esac\necho "a.cpp:1: fatal error: no" >&2; exit 1\n')  # fmt: skip
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "built"))
    tiny_plan(parallel={"zero_stage": 2, "offload": "optimizer-cpu"}, train={"optimizer": "adamw"}).save(
        tmp_path / "plan.json"
    )
    assert main([str(tmp_path / "plan.json"), "trainer"]) == 3
    said = capsys.readouterr()
    assert "compiling DeepSpeed's CPUAdam" in said.err
    assert "whose compilation failed: a.cpp:1: fatal error: no" in said.err
    assert "or set train.optimizer to adamw_torch_fused. [BUILD_FAILED]" in said.err
    assert said.out == "", "nothing is exported, and the command ends"
