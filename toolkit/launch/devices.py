"""The GPUs of this machine, by catalogue name, without torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from toolkit.catalog.gpus import Gpu, load_catalogue
from toolkit.errors import Problem
from toolkit.launch.accelerators import amd_problems, unsupported
from toolkit.planning.plan import Plan
from toolkit.units import whole_number

# One of them exists wherever an NVIDIA GPU can be used: on Linux, under WSL, on Tegra.
_DEVICES = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-ctrl")
# Largest share of a GPU's memory that its driver and error correction reserve.
_KEPT_SHARE = 0.08


def local_gpus(environment: Mapping[str, str] | None = None) -> list[str]:
    """Return the catalogue name of each NVIDIA card that processes may use here and the catalogue holds.

    Args:
        environment: Variables whose CUDA_VISIBLE_DEVICES selects the GPUs; those of this process when left out.
    """
    return [name for name in visible_cards(environment) or () if name is not None]


def too_few_cards(plan: Plan, environment: Mapping[str, str] | None = None) -> Iterator[Problem]:
    """Yield a problem if this machine has fewer GPUs than a plan has ranks; nothing without a driver to ask."""
    if plan.on_cpu:
        return
    if plan.gpu.vendor == "amd":
        yield from amd_problems(plan, environment=environment)
        return
    found = visible_cards(environment)
    if found is not None:
        yield from fewer_cards(plan.job.cluster.gpus_per_node, len(found))
    elif not any(Path(device).exists() for device in _DEVICES):
        yield unsupported(plan)


def fewer_cards(wanted: int, num_cards: int) -> Iterator[Problem]:
    """Yield a problem if a machine has fewer GPUs than a job has ranks."""
    if num_cards < wanted:
        yield Problem(
            code="LAUNCH_CARDS",
            key="cluster.gpus_per_node",
            message=f"gpus_per_node={wanted}, but processes on this machine can use {num_cards}",
            fix="Lower cluster.gpus_per_node, fix CUDA_VISIBLE_DEVICES, or start on another machine",
            source="nvmlDeviceGetCount",
        )


def card_problems(plan: Plan, environment: Mapping[str, str] | None = None) -> Iterator[Problem]:
    """Yield how this machine's GPUs differ from those of a plan: none, too few, or other models."""
    if plan.on_cpu:
        return
    if plan.gpu.vendor == "amd":
        yield from amd_problems(plan, environment=environment)
        return
    found = visible_cards(environment, described=plan.gpu if plan.gpu.described else None)
    if found is None:
        yield unsupported(plan)
        return
    yield from fewer_cards(plan.job.cluster.gpus_per_node, len(found))
    others = sorted({name or "a GPU that is not in the catalogue" for name in found} - {plan.gpu.name})
    if others:
        yield Problem(
            code="LAUNCH_CARDS",
            key="cluster.gpu",
            message=f"gpu={plan.gpu.name}, but this machine has {', '.join(others)}",
            fix="Set cluster.gpu to the card that the job runs on, for which it was planned and estimated",
        )


def visible_cards(
    environment: Mapping[str, str] | None = None, *, described: Gpu | None = None
) -> list[str | None] | None:
    """Return the catalogue name, or None, of each NVIDIA card that processes may use; None without a driver.

    Args:
        environment: Variables whose CUDA_VISIBLE_DEVICES selects the GPUs; those of this process when left out.
        described: GPU that a job describes; its name is returned for GPUs that match it.
    """
    import pynvml

    visible = (os.environ if environment is None else environment).get("CUDA_VISIBLE_DEVICES")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        found: dict[str, str | None] = {}
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                name, identity = (text_of(ask(handle)) for ask in (pynvml.nvmlDeviceGetName, pynvml.nvmlDeviceGetUUID))
                memory = pynvml.nvmlDeviceGetMemoryInfo(handle).total
            except pynvml.NVMLError:  # a GPU that is lost, or that does not report its memory
                continue
            found[identity] = match_gpu(name, int(memory), described)
        return [found[identity] for identity in chosen_cards(list(found), visible)]
    finally:
        pynvml.nvmlShutdown()


def text_of(name: str | bytes) -> str:
    """Return a name as NVML gives it, text or bytes by its version."""
    return name if isinstance(name, str) else name.decode()


def chosen_cards(identities: Sequence[str], visible: str | None) -> list[str]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names, by number or by the start of an identity.

    Entries after the first unknown one are ignored.

    >>> chosen_cards(["GPU-a1", "GPU-b2", "GPU-c3"], "2,GPU-a,7,1")
    ['GPU-c3', 'GPU-a1']

    Source:
        CUDA C++ Programming Guide, CUDA environment variables. Numbers are taken in PCI bus order.
    """
    if visible is None:
        return list(identities)
    chosen: list[str] = []
    for entry in map(str.strip, visible.split(",")):
        if entry.isdecimal():
            index = whole_number(entry)
            named = [] if index is None else list(identities[index : index + 1])
        else:
            named = [identity for identity in identities if entry and identity.startswith(entry)]
        if len(named) != 1:
            break
        chosen += named
    return chosen


def match_gpu(driver_name: str, memory_bytes: int, described: Gpu | None = None) -> str | None:
    """Find the GPU that a driver reports in the catalogue: every word of the family in the name, and the nearest memory.

    `described` matches a GPU with enough memory whose name has its family, or that the catalogue lacks.

    >>> match_gpu("NVIDIA H100 80GB HBM3", 85_520_809_984)
    'h100-sxm-80gb'
    """
    words = driver_name.lower().replace("-", " ").split()
    if described is None:
        return _catalogued(words, memory_bytes)
    # Planning with less memory than the GPU has is safe; planning with the driver's reserve included is common.
    enough = (described.memory_bytes or 0) <= (1 + _KEPT_SHARE) * memory_bytes
    if enough and _family(described) in "".join(words):
        return described.name
    known = _catalogued(words, memory_bytes)
    return described.name if known is None and enough else known


def _catalogued(words: Sequence[str], memory_bytes: int) -> str | None:
    candidates = [gpu for gpu in load_catalogue().values() if gpu.memory_bytes and _family(gpu) in "".join(words)]
    if not candidates:
        return None
    form = "pcie" if "pcie" in words else "nvl" if "nvl" in words else "sxm"
    longest = max(len(_family(gpu)) for gpu in candidates)
    family = [gpu for gpu in candidates if len(_family(gpu)) == longest]
    formed = [gpu for gpu in family if form in gpu.name.split("-")] or family
    nearest = min(formed, key=lambda gpu: abs((gpu.memory_bytes or 0) - memory_bytes))
    assert nearest.memory_bytes is not None
    # A GPU with another memory size is another model.
    return nearest.name if abs(nearest.memory_bytes - memory_bytes) < _KEPT_SHARE * memory_bytes else None


def _family(gpu: Gpu) -> str:
    """Return the letters and digits that name the chip, such as h100 or rtx4090."""
    parts = gpu.name.split("-")
    return "".join(parts[:2]) if parts[0] == "rtx" else parts[0]
