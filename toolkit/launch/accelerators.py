"""Accelerators of this machine other than NVIDIA's, and the accelerator that torch was built for; needs neither torch nor their drivers.

The toolkit computes through torch's `cuda` device, which is NVIDIA's and, in a ROCm build, AMD's. Any other is refused by its name.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path

from toolkit.errors import Problem
from toolkit.launch.extensions import installed_libraries
from toolkit.planning.plan import Plan
from toolkit.units import whole_number

AMD = "an AMD GPU"
_DOCUMENT = "docs/backends.md has what each accelerator can do"
# By PCI vendor, of devices that compute: sysfs has them in these classes, whatever driver is loaded.
_VENDORS = {"0x1002": AMD, "0x8086": "an Intel GPU (XPU)", "0x1da3": "an Intel Gaudi (HPU)", "0x1ae0": "a Google TPU"}
_CLASSES = ("sys/class/drm", "sys/class/accel")
_DEVICES = {
    "dev/kfd": AMD,
    "dev/davinci_manager": "a Huawei Ascend (NPU)",
    "dev/neuron0": "an AWS Trainium or Inferentia (Neuron)",
}
_VARIABLES = {"TPU_NAME": "a Google TPU", "TPU_ACCELERATOR_TYPE": "a Google TPU"}
# Of these, the first that is set chooses among AMD's cards.
_AMD_VISIBLE = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
_KFD_NODES = "sys/class/kfd/kfd/topology/nodes"


def other_accelerators(root: Path = Path("/"), environment: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the accelerators of this machine that are not NVIDIA's, in words with their article.

    Args:
        root: Folder under which `dev` and `sys` are.
        environment: Environment variables; those of this process when left out.
    """
    environment = os.environ if environment is None else environment
    found = [name for file, name in _DEVICES.items() if (root / file).exists()]
    found += [name for variable, name in _VARIABLES.items() if environment.get(variable)]
    for folder in _CLASSES:
        for vendor in sorted((root / folder).glob("*/device/vendor")):
            found += [_VENDORS[number] for number in [_text(vendor)] if number in _VENDORS]
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        found.append("an Apple GPU (MPS)")
    return tuple(dict.fromkeys(found))


def torch_build() -> str:
    """Return what the installed torch computes on, in words: `CUDA 13.0`, `ROCm 7.0`, `XPU` or `CPU only`."""
    installed = installed_libraries()
    if installed.cuda is not None:
        return f"CUDA {installed.cuda}"
    if installed.hip is not None:
        return f"ROCm {'.'.join(installed.hip.split('.')[:2])}"
    return "XPU" if installed.xpu is not None else "CPU only"


def unsupported(plan: Plan, *, root: Path = Path("/")) -> Problem:
    """Return the problem of a plan for NVIDIA's cards on a machine without their driver."""
    found = other_accelerators(root)
    if not found:
        return Problem(
            code="LAUNCH_CARDS",
            key="cluster.gpu",
            message=f"gpu={plan.gpu.name}, but this machine has no NVIDIA driver",
            fix="Start on a machine with the cards of the job, or set cluster.gpu to cpu for processes over gloo",
        )
    if AMD in found:
        return Problem(
            code="LAUNCH_CARDS",
            key="cluster.gpu",
            message=f"gpu={plan.gpu.name}, but this machine has {AMD} and no NVIDIA driver",
            fix="Set cluster.gpu to the AMD card of the machine (`toolkit gpus`), for which the job is planned anew, or to cpu",
        )
    return Problem(
        code="ACCELERATOR",
        key="cluster.gpu",
        message=f"gpu={plan.gpu.name}, but this machine has {' and '.join(found)}: the toolkit trains on NVIDIA's and AMD's cards and on CPUs",
        fix=f"Start on a machine with the cards of the job, or set cluster.gpu to cpu for processes over gloo; {_DOCUMENT}",
    )


def amd_problems(
    plan: Plan, *, root: Path = Path("/"), environment: Mapping[str, str] | None = None
) -> Iterator[Problem]:
    """Yield why a plan for AMD's cards cannot start here: no driver, a torch of another build, too few or other cards."""
    if not (root / "dev/kfd").exists():
        yield Problem(
            code="LAUNCH_CARDS",
            key="cluster.gpu",
            message=f"gpu={plan.gpu.name}, but this machine has no AMD driver (/dev/kfd)",
            fix="Start on a machine with the cards of the job, or set cluster.gpu to cpu for processes over gloo",
        )
        return
    if installed_libraries().hip is None:
        yield Problem(
            code="ACCELERATOR",
            key="cluster.gpu",
            message=f"gpu={plan.gpu.name} needs torch's ROCm build, and the installed torch is built for {torch_build()}",
            fix=f"Install the ROCm build of torch; {_DOCUMENT}",
        )
    cards = amd_cards(root, environment)
    wanted = plan.job.cluster.gpus_per_node
    if len(cards) < wanted:
        yield Problem(
            code="LAUNCH_CARDS",
            key="cluster.gpus_per_node",
            message=f"gpus_per_node={wanted}, but processes on this machine can use {len(cards)}",
            fix=f"Lower cluster.gpus_per_node, fix {' or '.join(_AMD_VISIBLE)}, or start on another machine",
        )
    others = sorted(set(cards) - {plan.gpu.compute_capability})
    if others:
        yield Problem(
            code="LAUNCH_CARDS",
            key="cluster.gpu",
            message=f"gpu={plan.gpu.name} is {plan.gpu.compute_capability}, but this machine has {', '.join(others)}",
            fix="Set cluster.gpu to the card that the job runs on, for which it was planned and estimated",
        )


def amd_cards(root: Path = Path("/"), environment: Mapping[str, str] | None = None) -> list[str]:
    """Return the gfx name of each AMD card that processes may use, from the kernel's list of compute nodes.

    Source:
        Linux drivers/gpu/drm/amd/amdkfd/kfd_topology.c: gfx_target_version is major × 10000 + minor × 100 + stepping, 0 for a CPU.
    """
    environment = os.environ if environment is None else environment
    found = []
    nodes = (root / _KFD_NODES).glob("*/properties")
    for properties in sorted(nodes, key=lambda path: (len(path.parent.name), path.parent.name)):
        values = dict(line.split(maxsplit=1) for line in _text(properties).splitlines() if " " in line)
        version = int(values.get("gfx_target_version", "0"))
        if version:
            found.append(f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}")
    visible = next((environment[name] for name in _AMD_VISIBLE if name in environment), None)
    if visible is None:
        return found
    chosen = []
    for entry in map(str.strip, visible.split(",")):
        index = whole_number(entry)
        if index is None or index >= len(found):
            break
        chosen.append(found[index])
    return chosen


def accelerator_warnings(plan: Plan) -> Iterator[str]:
    """Yield a warning of a plan for cards on which nothing has been tested."""
    if plan.gpu.vendor == "amd":
        yield (
            f"gpu={plan.gpu.name}: jobs for AMD's cards are planned, estimated and started through torch's ROCm build, but no run on one "
            f"has been tested. {_DOCUMENT}"
        )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
