"""What is said of tools that are missing or do not fit, with tools that are made for it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from toolkit.doctor.compilers import build_findings, build_now, known_extensions
from toolkit.launch import build_tools
from toolkit.launch.extensions import Installed, Machine

CUDA = Installed(torch=(2, 13), cuda="13.0")


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A machine with a compiler, ninja, and an nvcc of CUDA 12.8, and no other CUDA."""
    monkeypatch.setattr(build_tools, "CUDA_FOLDERS", tmp_path / "local")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not Path(entry, "nvidia").exists()])
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("c++", "ninja", "cc", "nvcc"):
        (folder / name).write_text("#!/bin/sh\necho Cuda compilation tools, release 12.8, V12.8.1\n")
        (folder / name).chmod(0o755)
    return {"PATH": str(folder), "TORCH_EXTENSIONS_DIR": str(tmp_path / "built"), "CC": str(folder / "cc")}


def found(environment: dict[str, str]) -> dict[str, str]:
    machine = Machine(environment=environment, installed=CUDA)
    findings = build_findings(known_extensions(on_card=True), machine, capability="9.0")
    return {finding.code: f"{finding.seen} | {finding.repair}" for finding in findings}


def test_an_nvcc_of_another_cuda(tools: dict[str, str]) -> None:
    said = found(tools)["BUILD_REPLACED"]
    assert "FusedAdam" in said
    assert "is CUDA 12.8's, and torch was built with CUDA 13.0" in said
    assert "cuda-nvcc-13-0" in said
    assert "CUDA_HOME=/usr/local/cuda-13.0" in said


def test_no_compiler_and_an_odd_list(tools: dict[str, str]) -> None:
    Path(tools["PATH"], "c++").unlink()
    said = found(tools | {"TORCH_CUDA_ARCH_LIST": "9.0a"})
    assert "TORCH_CUDA_ARCH_LIST=9.0: TORCH_CUDA_ARCH_LIST=9.0a is not a list" in said["BUILD_SETTING"]
    assert "Nothing; after `unset TORCH_CUDA_ARCH_LIST`" in said["BUILD_SETTING"]
    assert "apt-get install -y g++" in said["BUILD_MISSING"]


def test_no_ninja_is_no_reason_to_delete_path(tools: dict[str, str]) -> None:
    Path(tools["PATH"], "ninja").unlink()
    said = found(tools)["BUILD_SETTING"]
    assert "ninja is not on PATH" in said
    assert "unset" not in said


def test_a_stale_lock(tools: dict[str, str]) -> None:
    lock = Path(tools["TORCH_EXTENSIONS_DIR"], "cpu_adam", "lock")
    lock.parent.mkdir(parents=True)
    lock.touch()
    assert found(tools)["BUILD_STALE_LOCK"] == f"{lock} has no owner | rm {lock}"
    assert lock.exists(), "a look changes nothing"


@pytest.mark.full
def test_builds_are_made_or_say_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By DeepSpeed's own builder, in a process of its own: a compiler that fails."""
    compiler = tmp_path / "g++"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *version*) echo 12.2.0; exit 0;; esac\necho "a.cpp:1: fatal error: no" >&2; exit 1\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "built"))
    able = [each for each in known_extensions(on_card=False) if each.name == "cpu_adam"]
    (finding,) = build_now(able, Machine(), seconds=100, capability=None)
    assert (finding.code, finding.seen) == ("BUILD_BROKEN", "CPUAdam: a.cpp:1: fatal error: no")
    (late,) = build_now(able, Machine(), seconds=0.1, capability=None)
    assert late.code == "PROBE_TIMEOUT"
