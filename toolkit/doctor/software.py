"""Versions of packages, of the driver and of CUDA, and whether they fit."""

from __future__ import annotations

import platform
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from toolkit.doctor.findings import Finding, found
from toolkit.launch.accelerators import AMD, other_accelerators
from toolkit.launch.extensions import installed_libraries
from toolkit.version import version_of

# Those whose versions a report should have.
_TOLD = ("torch", "deepspeed", "transformers", "accelerate", "peft", "datasets", "nvidia-nccl-cu13", "nvidia-nccl-cu12")
_DISTRIBUTION = "accelerator-toolkit"
_DEVICES = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-ctrl")


def requirements() -> list[Requirement]:
    """Return what the toolkit requires, without extras: as installed, else as the pyproject.toml of this source tree says."""
    try:
        written = requires(_DISTRIBUTION) or []
    except PackageNotFoundError:
        file = Path(__file__).parents[2] / "pyproject.toml"
        written = tomllib.loads(file.read_text(encoding="utf-8"))["project"]["dependencies"] if file.is_file() else []
    read = [Requirement(line) for line in written]
    return [one for one in read if one.marker is None or one.marker.evaluate({"extra": ""})]


def package_findings() -> Iterator[Finding]:
    """Yield what is missing or outside its range, then the versions."""
    for requirement in requirements():
        version = version_of(requirement.name)
        named = f"{requirement.name}{requirement.specifier}"
        if version is None:
            yield found("PACKAGE_MISSING", f"{requirement.name} is not installed", requirement=named)
        elif not requirement.specifier.contains(version, prereleases=True):
            seen = f"{requirement.name} is {version}, outside of {requirement.specifier}"
            yield found("PACKAGE_RANGE", seen, requirement=named)
    versions = [f"{name} {version}" for name in _TOLD if (version := version_of(name)) is not None]
    cuda = installed_libraries().cuda
    built = f"torch is built with CUDA {cuda}" if cuda else "torch is built without CUDA"
    python = ".".join(map(str, sys.version_info[:3]))
    yield found(
        "SOFTWARE", f"Python {python}, {', '.join(versions)}; {built}; {platform.system()} {platform.release()}"
    )


def driver_findings() -> Iterator[Finding]:
    """Yield how the driver fits torch's CUDA."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        yield _no_driver(error)
        return
    driver = pynvml.nvmlSystemGetDriverVersion()
    number = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
    count = pynvml.nvmlDeviceGetCount()
    pynvml.nvmlShutdown()
    yield from driver_fit(str(driver), (number // 1000, number % 1000 // 10), installed_libraries().cuda, count)


def driver_fit(driver: str, runs: tuple[int, int], built: str | None, num_cards: int) -> Iterator[Finding]:
    """Yield how a driver fits the CUDA that torch was built with.

    Args:
        driver: Version of the driver.
        runs: Highest CUDA that it runs.
        built: CUDA of torch; None for a build without.
        num_cards: Number of GPUs.

    Source:
        CUDA Compatibility, minor version compatibility, https://docs.nvidia.com/deploy/cuda-compatibility/.
    """
    name = f"driver {driver} runs CUDA {runs[0]}.{runs[1]}"
    version = version_of("torch")
    if built is None:
        if num_cards and version is not None and "rocm" not in version:
            digits = f"{runs[0]}{runs[1]}"
            yield found("TORCH_WITHOUT_CUDA", f"torch {version} is built without CUDA; {name}", driver=digits)
        return
    wanted = Version(built)
    if wanted.major > runs[0]:
        seen = f"{name}, and torch is built with CUDA {built}"
        yield found("DRIVER_OLD", seen, cuda=built, older=f"{runs[0]}{runs[1]}")
    elif (wanted.major, wanted.minor) > runs:
        yield found("DRIVER_MINOR", f"{name}, and torch is built with CUDA {built}")
    else:
        yield found("SOFTWARE", f"{name}; torch is built with CUDA {built}")


def _no_driver(error: Exception) -> Finding:
    there = [path for path in _DEVICES if Path(path).exists()]
    others = "".join(
        f"; it has {name}, {'which is not probed, and jobs may use' if name == AMD else 'which the toolkit does not use'}"
        for name in other_accelerators()
    )
    if not there:
        return found("DRIVER_ABSENT", f"no NVIDIA GPU can be used on this machine: {error}{others}")
    hint = "Start the container with `--gpus all` and NVIDIA_DRIVER_CAPABILITIES=compute,utility"
    if "mismatch" in str(error).lower():
        hint = "The driver was updated beneath running programs: reboot, or `sudo rmmod nvidia_uvm nvidia && sudo modprobe nvidia_uvm`"
    return found("DRIVER_BROKEN", f"{', '.join(there)} exists, and NVML says: {error}", hint=hint)
