"""The device of a rank."""

from __future__ import annotations

import torch

from toolkit.errors import PlanError
from toolkit.launch.accelerators import other_accelerators, torch_build


def rank_device(backend: str, local_rank: int) -> torch.device:
    """Return the device of a rank's tensors, and make it torch's current one.

    Raises:
        PlanError: WORLD_NO_GPU, if the backend needs a GPU and this rank has none.
    """
    if backend == "gloo":
        return torch.device("cpu")
    if not torch.cuda.is_available() or local_rank >= torch.cuda.device_count():
        found = other_accelerators()
        beside = f", and this machine has {' and '.join(found)}" if found else ""
        seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
        raise PlanError.of(
            code="WORLD_NO_GPU",
            key="cluster.gpu",
            message=f"local rank {local_rank} has no GPU: torch sees {seen} CUDA device{'' if seen == 1 else 's'} (it is built for "
            f"{torch_build()}){beside}",
            fix="Lower cluster.gpus_per_node, fix the driver, torch's build or CUDA_VISIBLE_DEVICES, or set cluster.gpu to cpu; "
            "for tk.groups.init, pass backend='gloo'",
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
