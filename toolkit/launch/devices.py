"""Which cards this machine has, by catalogue name, without torch."""

from __future__ import annotations

import os
from collections.abc import Mapping

from toolkit.spec.catalogue import Gpu, load_catalogue


def local_gpus(environment: Mapping[str, str] | None = None) -> list[str]:
    """Gives the catalogue name of each NVIDIA card that processes may use here and the catalogue holds.

    Args:
        environment: Whose CUDA_VISIBLE_DEVICES limits the number of cards; this process's own when left out.
    """
    import pynvml

    visible = (os.environ if environment is None else environment).get("CUDA_VISIBLE_DEVICES")
    limit = (
        None if visible is None else len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    )

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        found = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                name = pynvml.nvmlDeviceGetName(handle)
                memory = pynvml.nvmlDeviceGetMemoryInfo(handle).total
            except pynvml.NVMLError:  # a card that is lost, or that tells nothing of its memory
                continue
            match = match_gpu(name if isinstance(name, str) else name.decode(), int(memory))
            found += [match] if match else []
        return found[:limit]
    finally:
        pynvml.nvmlShutdown()


def match_gpu(driver_name: str, memory_bytes: int) -> str | None:
    """Finds a driver's card in the catalogue: every word of the family in the name, and the nearest memory.

    >>> match_gpu("NVIDIA H100 80GB HBM3", 85_520_809_984)
    'h100-sxm-80gb'
    """
    words = driver_name.lower().replace("-", " ").split()
    candidates = [gpu for gpu in load_catalogue().values() if gpu.memory_bytes and _family(gpu) in "".join(words)]
    if not candidates:
        return None
    form = "pcie" if "pcie" in words else "nvl" if "nvl" in words else "sxm"
    longest = max(len(_family(gpu)) for gpu in candidates)
    family = [gpu for gpu in candidates if len(_family(gpu)) == longest]
    formed = [gpu for gpu in family if form in gpu.name.split("-")] or family
    nearest = min(formed, key=lambda gpu: abs((gpu.memory_bytes or 0) - memory_bytes))
    assert nearest.memory_bytes is not None
    # The driver keeps a few percent to itself; a card of another size is another card.
    return nearest.name if abs(nearest.memory_bytes - memory_bytes) < 0.08 * memory_bytes else None


def _family(gpu: Gpu) -> str:
    """Gives the letters and digits that name the chip, such as h100 or rtx4090."""
    parts = gpu.name.split("-")
    return "".join(parts[:2]) if parts[0] == "rtx" else parts[0]
