"""Which of DeepSpeed's extensions a plan loads, and where they lie: held to what torch and DeepSpeed say themselves."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_plans import tiny_plan

from toolkit.launch.extensions import Installed, Machine, extensions_of, installed_libraries

CARD = "h100-sxm-80gb"
HOST = {"zero_stage": 2, "offload": "optimizer-cpu", "offload_engine": "deepspeed"}
SHM = "deepspeed_shm_comm"


@pytest.mark.parametrize(
    ("gpu", "consumer", "changes", "expected"),
    [
        ("cpu", "toolkit", {}, []),
        ("cpu", "toolkit", {"parallel": HOST}, ["cpu_adam"]),
        ("cpu", "trainer", {}, [SHM]),
        ("cpu", "accelerate", {"parallel": HOST}, [SHM, "cpu_adam"]),
        (CARD, "toolkit", {}, ["fused_adam"]),
        (CARD, "toolkit", {"train": {"optimizer": "adamw_torch"}}, []),
        (CARD, "toolkit", {"train": {"optimizer": "adamw_torch_fused"}}, []),
        (CARD, "toolkit", {"train": {"optimizer": "adamw_8bit"}}, []),
        (CARD, "toolkit", {"parallel": {"strategy": "ddp", "zero_stage": None}}, []),
        (CARD, "toolkit", {"parallel": {"strategy": "fsdp2", "zero_stage": None}}, []),
        (CARD, "toolkit", {"train": {"optimizer": "sgd"}}, []),
        (CARD, "toolkit", {"train": {"optimizer": "lion"}}, ["fused_lion"]),
        (CARD, "toolkit", {"train": {"optimizer": "lion"}, "parallel": HOST}, ["cpu_lion"]),
        (CARD, "trainer", {}, ["fused_adam"]),
        (CARD, "accelerate", {}, []),
        (CARD, "accelerate", {"parallel": HOST}, ["cpu_adam"]),
        (
            CARD,
            "toolkit",
            {"parallel": {"zero_stage": 3}, "deepspeed": {"zero_optimization": {"zero_quantized_weights": True}}},
            ["quantizer", "fused_adam"],
        ),
    ],
)
def test_those_that_a_run_loads(gpu: str, consumer: Any, changes: dict[str, Any], expected: list[str]) -> None:
    assert [extension.name for extension in extensions_of(tiny_plan(gpu=gpu, **changes), consumer)] == expected


def test_where_torch_builds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.cpp_extension import _get_build_directory

    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    (extension,) = extensions_of(tiny_plan(parallel=HOST))
    for name in ("HOME", "XDG_CACHE_HOME", "TORCH_EXTENSIONS_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
        environment = {name: str(tmp_path / name), **({} if name == "HOME" else {"HOME": str(tmp_path / "HOME")})}
        found = Machine(environment=environment).folder(extension)
        assert str(found) == _get_build_directory("cpu_adam", verbose=False)


def test_what_the_libraries_say_of_themselves() -> None:
    from deepspeed.git_version_info import accelerator_name, installed_ops

    found = installed_libraries()
    assert found.torch == tuple(map(int, torch.__version__.split(".")[:2]))
    assert found.cuda == torch.version.cuda
    assert found.prebuilt == {name for name, is_there in installed_ops.items() if is_there}
    assert found.prebuilt_for == accelerator_name


def test_those_that_are_still_to_be_compiled(tmp_path: Path) -> None:
    machine = Machine(environment={"TORCH_EXTENSIONS_DIR": str(tmp_path)})
    (extension,) = machine.compiles(tiny_plan(parallel=HOST))
    assert extension.title == "CPUAdam"
    (tmp_path / "cpu_adam").mkdir()
    assert not machine.has_built(extension), "a folder alone is a compilation that was broken off"
    (tmp_path / "cpu_adam" / "cpu_adam.so").touch()
    assert machine.has_built(extension)


def test_what_deepspeed_was_installed_with_is_of_one_accelerator() -> None:
    prebuilt = Installed(torch=(2, 13), cuda=None, prebuilt=frozenset({"cpu_adam"}), prebuilt_for="cpu")
    assert Machine(installed=prebuilt).compiles(tiny_plan(parallel=HOST)) == ()
    assert len(Machine(installed=prebuilt).compiles(tiny_plan(parallel=HOST, gpu=CARD))) == 1


def test_no_library_is_imported_for_it() -> None:
    import subprocess

    program = (
        "import sys\nfrom toolkit.launch.extensions import installed_libraries\n"
        "print(installed_libraries().torch, {'torch', 'deepspeed'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == f"{installed_libraries().torch} set()\n"
