"""What this machine lacks to compile DeepSpeed's extensions, over folders of small tools in place of the real ones."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_plans import tiny_plan

from toolkit.launch import build_tools
from toolkit.launch.build_tools import build_settings, built_with, tool_problems
from toolkit.launch.environment import Setting
from toolkit.launch.extensions import Installed, Machine

CUDA = Installed(torch=(2, 13), cuda="13.0")
HOST = {"zero_stage": 2, "offload": "optimizer-cpu", "offload_engine": "deepspeed"}
CARD = "h100-sxm-80gb"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that makes a machine with the tools named, and gives its environment; CUDA is installed nowhere else."""
    monkeypatch.setattr(build_tools, "CUDA_FOLDERS", tmp_path / "local")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not Path(entry, "nvidia").exists()])

    def make(*names: str, nvcc: str = "13.0") -> dict[str, str]:
        tools = tmp_path / "cuda" / "bin"
        tools.mkdir(parents=True)
        for name in names:
            said = f"Cuda compilation tools, release {nvcc}, V{nvcc}.88" if name == "nvcc" else "1.2.3"
            (tools / name).write_text(f"#!/bin/sh\necho '{said}'\n")
            (tools / name).chmod(0o755)
        return {"PATH": str(tools), "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}

    return make


def lacking(environment: dict[str, str], *, installed: Installed = CUDA, **changes: Any) -> str:
    plan = tiny_plan(**{"gpu": CARD, **changes})
    problems = list(tool_problems(plan, machine=Machine(environment=environment, installed=installed)))
    assert {problem.code for problem in problems} <= {"BUILD_TOOLS"}
    return " | ".join(map(str, problems))


def built(environment: dict[str, str], name: str) -> None:
    folder = Path(environment["TORCH_EXTENSIONS_DIR"], name)
    folder.mkdir(parents=True)
    (folder / f"{name}.so").touch()


def test_a_machine_with_all_of_them(machine) -> None:
    assert lacking(machine("ninja", "c++", "nvcc")) == ""


def test_no_nvcc(machine) -> None:
    said = lacking(environment := machine("ninja", "c++") | {"CUDA_HOME": "/absent"})
    assert "optimizer=adamw loads DeepSpeed's FusedAdam" in said
    assert "no nvcc: /absent/bin/nvcc cannot be run (No such file or directory)" in said
    assert "or set train.optimizer to adamw_torch_fused" in said
    assert lacking(environment, parallel=HOST) == "", "CPUAdam needs none"
    assert lacking(environment, train={"optimizer": "adamw_torch"}) == ""


@pytest.mark.skipif(Path("/usr/local/cuda").exists(), reason="there is one where torch looks last")
def test_no_cuda_at_all(machine) -> None:
    assert "CUDA_HOME is not set, nvcc is not on PATH" in lacking(machine("ninja", "c++"))


def test_the_nvcc_of_another_cuda(machine) -> None:
    environment = machine("ninja", "c++", "nvcc", nvcc="12.8")
    assert "is CUDA 12.8's, and torch was built with CUDA 13.0: CUDA_HOME must point to a CUDA 13" in lacking(
        environment
    )
    assert lacking(environment, installed=Installed(torch=(2, 13), cuda="12.6")) == "", "minor versions go together"
    assert lacking(environment | {"DS_SKIP_CUDA_CHECK": "1"}) == "", "as for DeepSpeed itself"


def test_no_compiler(machine) -> None:
    environment = machine("ninja", "nvcc")
    assert "no C++ compiler: c++ is not on PATH" in lacking(environment)
    assert "no C++ compiler: absent is not on PATH" in lacking(environment | {"CXX": "absent -O1"})
    assert lacking(environment | {"CXX": f"{sys.executable} -O1"}) == ""
    assert "CPUAdam" in lacking(environment, parallel=HOST)


def test_no_ninja(machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment = machine("c++", "nvcc")
    assert lacking(environment) == "", "DeepSpeed's own dependency, which a virtual environment need not have on PATH"
    (setting,) = build_settings(tiny_plan(gpu=CARD), machine=Machine(environment=environment)).items()
    assert setting[0] == "PATH"
    added = Path(setting[1].value.removeprefix(f"{environment['PATH']}:"))
    assert os.access(added / "ninja", os.X_OK)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert "no ninja (`pip install ninja`)" in lacking(environment)


def test_of_what_is_compiled_each_load_asks_less(machine) -> None:
    environment = machine("ninja") | {"CUDA_HOME": "/absent"}
    built(environment, "fused_adam")
    assert lacking(environment) == ""
    bare = {**environment, "PATH": "/nowhere"}
    assert "no C++ compiler" in lacking(bare, parallel=HOST)
    built(bare, "cpu_adam")
    assert lacking(bare, parallel=HOST) == "", "ninja comes with its package"


def test_an_nvme_offload_needs_libaio_too(machine, tmp_path: Path) -> None:
    """As the compiler of C answers, which is asked to link a program with it."""
    plan = {
        "parallel": {"zero_stage": 3, "offload": "full-nvme"},
        "train": {"optimizer": "adamw"},
    }
    environment = machine("ninja", "c++", "nvcc")
    without, with_it = (
        Machine(environment=environment | {"CC": shutil.which(name)}, installed=CUDA) for name in ("false", "true")
    )
    (problem,) = tool_problems(nvme_plan(tmp_path, **plan), machine=without)
    assert "loads DeepSpeed's async_io, which is compiled at first use" in problem.message
    assert "no libaio to link with" in problem.message
    assert "set parallel.offload to full-cpu" in problem.fix
    assert not list(tool_problems(nvme_plan(tmp_path, **plan), machine=with_it))


def nvme_plan(folder: Path, **changes: Any):
    from toolkit.planning.resolve import resolve

    plan = tiny_plan(gpu=CARD, parallel={"zero_stage": 3})
    values = plan.job.model_dump(mode="json", exclude_unset=True) | changes
    values["model"] = {"name": "quickstart-llama", "init": "random"}
    values["cluster"]["nvme_path"] = str(folder)
    return resolve(type(plan.job).model_validate(values))


def test_the_list_is_changed_for_what_nvcc_compiles_and_for_that_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0a")
    assert "TORCH_CUDA_ARCH_LIST" not in build_settings(tiny_plan(gpu=CARD, parallel=HOST))
    settings = build_settings(tiny_plan(gpu=CARD))
    assert "its kernels are built for 9.0" in settings["TORCH_CUDA_ARCH_LIST"].reason
    with built_with(settings):
        assert os.environ["TORCH_CUDA_ARCH_LIST"] == "9.0"
    assert os.environ["TORCH_CUDA_ARCH_LIST"] == "9.0a", "a script's own kernels are built as before"


def test_another_cuda_that_fits_is_taken(machine, tmp_path: Path) -> None:
    """Where the one on PATH is another version's: the highest of torch's that is installed, and torch's own first."""
    plan = tiny_plan(gpu=CARD)
    environment = machine("ninja", "c++", "nvcc", nvcc="12.8")
    here = Machine(environment=environment, installed=CUDA)
    for name, version in (("cuda", "12.6"), ("cuda-13.1", "13.1"), ("cuda-13.2", "none")):
        nvcc = tmp_path / "local" / name / "bin" / "nvcc"
        nvcc.parent.mkdir(parents=True)
        nvcc.write_text("#!/bin/sh\n" + ("exit 1" if version == "none" else f"echo release {version}"))
        nvcc.chmod(0o755)
    setting = build_settings(plan, machine=here)["CUDA_HOME"]
    assert setting.value == str(tmp_path / "local" / "cuda-13.1"), "that of 13.2 cannot be run"
    assert lacking(environment) == ""
    assert "CUDA_HOME" not in build_settings(tiny_plan(gpu=CARD, parallel=HOST), machine=here)
    fitting = Machine(environment=environment, installed=Installed(torch=(2, 13), cuda="12.8"))
    assert "CUDA_HOME" not in build_settings(plan, machine=fitting)


def test_cuda_home_is_changed_where_torch_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils import cpp_extension

    monkeypatch.setattr(cpp_extension, "CUDA_HOME", "/before")
    with built_with({"CUDA_HOME": Setting("/fitting", "")}):
        assert (cpp_extension.CUDA_HOME, os.environ["CUDA_HOME"]) == ("/fitting", "/fitting")
    assert cpp_extension.CUDA_HOME == "/before"


def test_a_compiler_of_another_name(machine) -> None:
    environment = machine("ninja", "g++", "nvcc")
    assert lacking(environment) == ""
    assert (
        build_settings(tiny_plan(gpu=CARD), machine=Machine(environment=environment, installed=CUDA))["CXX"].value
        == "g++"
    )


def test_a_cache_that_cannot_be_written(machine, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    environment = machine("ninja", "c++", "nvcc") | {"TORCH_EXTENSIONS_DIR": str(tmp_path / "file" / "cache")}
    environment["TMPDIR"] = str(tmp_path)
    here = Machine(environment=environment, installed=CUDA)
    other = build_settings(tiny_plan(gpu=CARD), machine=here)["TORCH_EXTENSIONS_DIR"].value
    assert Path(other).parents[1] == tmp_path
    assert lacking(environment) == ""
    assert "cannot be written" in lacking(environment | {"TMPDIR": str(tmp_path / "file")})
