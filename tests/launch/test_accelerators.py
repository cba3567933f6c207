"""Machines with accelerators of other makers, as the kernel shows them: what is refused is refused by its name."""

from __future__ import annotations

from pathlib import Path

import pytest

import toolkit as tk
from toolkit.catalog.gpus import find_gpu, load_catalogue
from toolkit.config.job import Card
from toolkit.distributed.device import rank_device
from toolkit.errors import PlanError, SpecError
from toolkit.launch import accelerators, devices
from toolkit.launch.accelerators import (
    accelerator_warnings,
    amd_cards,
    amd_problems,
    other_accelerators,
    torch_build,
    unsupported,
)
from toolkit.launch.extensions import Installed
from toolkit.launch.identity import WorkerIdentity


def plan_of(gpu: str, **cluster: int) -> tk.Plan:
    return tk.resolve(tk.Job(model="quickstart-llama", cluster=tk.Cluster(gpu=gpu, **cluster)))


def machine(root: Path, *files: str, vendors: dict[str, str] | None = None, gfx: tuple[int, ...] = ()) -> Path:
    """Makes the files by which a kernel shows its devices."""
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).touch()
    for device, vendor in (vendors or {}).items():
        folder = root / "sys/class" / device / "device"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
    for index, version in enumerate((0, *gfx)):  # a node of the CPU comes first
        folder = root / f"sys/class/kfd/kfd/topology/nodes/{index}"
        folder.mkdir(parents=True)
        (folder / "properties").write_text(f"cpu_cores_count 0\nsimd_count 4\ngfx_target_version {version}\n")
    return root


@pytest.mark.parametrize(
    ("files", "vendors", "environment", "found"),
    [
        ((), {"drm/card0": "0x10de", "drm/renderD128": "0x10de"}, {}, ()),  # NVIDIA's
        (("dev/kfd",), {"drm/renderD128": "0x1002"}, {}, ("an AMD GPU",)),
        ((), {"drm/renderD128": "0x8086", "drm/renderD129": "0x8086"}, {}, ("an Intel GPU (XPU)",)),
        ((), {"accel/accel0": "0x1da3"}, {}, ("an Intel Gaudi (HPU)",)),
        ((), {"accel/accel0": "0x1ae0"}, {}, ("a Google TPU",)),
        ((), {}, {"TPU_ACCELERATOR_TYPE": "v5litepod-8"}, ("a Google TPU",)),
        (("dev/davinci_manager",), {}, {}, ("a Huawei Ascend (NPU)",)),
        (("dev/neuron0",), {}, {}, ("an AWS Trainium or Inferentia (Neuron)",)),
    ],
)
def test_accelerators_are_known_by_what_the_kernel_shows(tmp_path, files, vendors, environment, found):
    root = machine(tmp_path, *files, vendors=vendors)
    assert other_accelerators(root, environment) == found
    problem = unsupported(plan_of("h100-sxm-80gb"), root=root) if not environment else None
    if problem is not None and found and found != ("an AMD GPU",):
        assert problem.code == "ACCELERATOR"
        assert found[0] in problem.message
    elif problem is not None:
        assert problem.code == "LAUNCH_CARDS"


def test_an_apple_machine_is_known(tmp_path, monkeypatch):
    monkeypatch.setattr(accelerators.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(accelerators.platform, "machine", lambda: "arm64")
    assert other_accelerators(tmp_path, {}) == ("an Apple GPU (MPS)",)


@pytest.mark.parametrize(
    ("name", "maker"),
    [
        ("tpu-v5e", "a Google TPU"),
        ("v5p-8", "a Google TPU"),
        ("mps", "an Apple GPU"),
        ("M3 Max", "an Apple GPU"),
        ("xpu", "an Intel GPU (XPU)"),
        ("max-1550", "an Intel GPU (XPU)"),
        ("Gaudi3", "an Intel Gaudi (HPU)"),
        ("ascend-910b", "a Huawei Ascend (NPU)"),
        ("trn2", "an AWS Trainium or Inferentia (Neuron)"),
    ],
)
def test_a_job_that_names_one_is_refused_by_its_name(name, maker):
    for card in (name, Card(name=name, memory_gib=64, bf16_tflops=100)):
        with pytest.raises(SpecError) as refused:
            find_gpu(card)
        (problem,) = refused.value.problems
        assert (problem.code, problem.key) == ("ACCELERATOR", "cluster.gpu")
        assert f"is {maker}: " in problem.message


def test_no_card_of_the_catalogue_nor_of_nvidia_is_taken_for_one():
    for name in (*load_catalogue(), "v100", "m40", "m60", "p100", "a800", "mi325x", "rtx-pro-6000", "gh200"):
        try:
            find_gpu(name)
            refused: tuple[str, ...] = ()
        except SpecError as error:
            refused = error.codes
        assert "ACCELERATOR" not in refused, name


def test_amd_cards_are_counted_and_compared(tmp_path, monkeypatch):
    plan = plan_of("mi300x-192gb", gpus_per_node=2)
    root = machine(tmp_path, "dev/kfd", gfx=(90402, 90402, 90010))
    assert amd_cards(root, {}) == ["gfx942", "gfx942", "gfx90a"]
    assert amd_cards(root, {"HIP_VISIBLE_DEVICES": "2,0"}) == ["gfx90a", "gfx942"]
    assert amd_cards(root, {"CUDA_VISIBLE_DEVICES": ""}) == []
    rocm = Installed(torch=(2, 13), cuda=None, hip="7.0.51831")
    monkeypatch.setattr(accelerators, "installed_libraries", lambda: rocm)
    assert torch_build() == "ROCm 7.0"
    assert list(amd_problems(plan, root=root, environment={"HIP_VISIBLE_DEVICES": "0,1"})) == []
    found = {
        problem.key: problem for problem in amd_problems(plan, root=root, environment={"HIP_VISIBLE_DEVICES": "2"})
    }
    assert {problem.code for problem in found.values()} == {"LAUNCH_CARDS"}
    assert "can use 1" in found["cluster.gpus_per_node"].message
    assert "gpu=mi300x-192gb is gfx942, but this machine has gfx90a" in found["cluster.gpu"].message


def test_amd_cards_need_their_driver_and_a_build_of_torch_for_them(tmp_path, monkeypatch):
    plan = plan_of("mi300x-192gb")
    (problem,) = amd_problems(plan, root=tmp_path, environment={})
    assert "no AMD driver (/dev/kfd)" in problem.message
    root = machine(tmp_path, "dev/kfd", gfx=(90402,))
    monkeypatch.setattr(accelerators, "installed_libraries", lambda: Installed(torch=(2, 13), cuda="13.0"))
    (problem,) = amd_problems(plan, root=root, environment={})
    assert problem.code == "ACCELERATOR"
    assert "the installed torch is built for CUDA 13.0" in problem.message


def test_a_job_for_nvidia_cards_on_a_machine_with_amd_cards_is_told_of_them(tmp_path):
    problem = unsupported(plan_of("h100-sxm-80gb"), root=machine(tmp_path, "dev/kfd"))
    assert problem.code == "LAUNCH_CARDS"
    assert "this machine has an AMD GPU and no NVIDIA driver" in problem.message


def test_amd_cards_are_untested_and_said_to_be():
    (warning,) = accelerator_warnings(plan_of("mi300x-192gb"))
    assert "no run on one has been tested" in warning
    assert list(accelerator_warnings(plan_of("h100-sxm-80gb"))) == []
    assert list(accelerator_warnings(plan_of("cpu"))) == []


def test_a_start_for_amd_cards_is_refused_here_before_anything_runs():
    """This machine has none."""
    if Path("/dev/kfd").exists():
        pytest.skip("this machine has AMD cards")
    for problems in (devices.too_few_cards, devices.card_problems):
        (problem,) = problems(plan_of("mi300x-192gb"))
        assert problem.code == "LAUNCH_CARDS"


def test_a_rank_without_a_card_says_what_torch_was_built_for():
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has cards")
    with pytest.raises(PlanError, match=r"built for (CPU only|CUDA)"):
        rank_device("nccl", WorkerIdentity(rank=0, local_rank=0, world_size=1))
