"""The device of a rank."""

from __future__ import annotations

import os
import socket
from typing import Any, cast

import torch
from torch._C._distributed_c10d import Store

from toolkit.errors import PlanError, RunError
from toolkit.launch.accelerators import other_accelerators, torch_build
from toolkit.launch.identity import WorkerIdentity
from toolkit.topology.table import name_ranks


def rank_device(backend: str, identity: WorkerIdentity) -> torch.device:
    """Return the device of a rank's tensors, and make it torch's current one.

    Raises:
        PlanError: WORLD_NO_GPU, if the backend needs a GPU and this rank has none.
    """
    if backend == "gloo":
        return torch.device("cpu")
    index = own_card(identity)
    if index is None:
        found = other_accelerators()
        beside = f", and this machine has {' and '.join(found)}" if found else ""
        seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
        raise PlanError.of(
            code="WORLD_NO_GPU",
            key="cluster.gpu",
            message=f"local rank {identity.local_rank} has no GPU: torch sees {seen} CUDA device{'' if seen == 1 else 's'} (it is built "
            f"for {torch_build()}){beside}",
            fix="Lower cluster.gpus_per_node, fix the driver, torch's build or CUDA_VISIBLE_DEVICES, or set cluster.gpu to cpu; "
            "for tk.groups.init, pass backend='gloo'",
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def own_card(identity: WorkerIdentity) -> int | None:
    """Return the index of a rank's card among those that torch sees; None if it has none."""
    return identity.card_index(torch.cuda.device_count() if torch.cuda.is_available() else 0)


def tell_card(device: torch.device) -> None:
    """Let what takes LOCAL_RANK for the number of a card find it: DeepSpeed's engine, Accelerate, a user's script.

    Source:
        deepspeed 0.19.8 runtime/engine.py _set_distributed_vars; accelerate 1.15 state.py PartialState.set_device.
    """
    if device.index is not None:
        os.environ["LOCAL_RANK"] = str(device.index)


def card_name(device: torch.device) -> str:
    """Return a name of a card that no other has, on any machine."""
    return f"{socket.gethostname()}/{torch.cuda.get_device_properties(device).uuid}"


def check_own_cards(store: Store, identity: WorkerIdentity, card: str) -> None:
    """Compare the cards of all ranks: a scheduler that shows each of them one card may have shown the same to several.

    NCCL would end all of them with `Duplicate GPU detected` in a trace.

    Args:
        store: Store that all ranks share; each waits for the others.
        identity: Identity of this rank.
        card: Name of its card.

    Raises:
        RunError: WORLD_CARD_SHARED, on all ranks.
    """
    keys = [f"card-{rank}" for rank in range(identity.world_size)]
    store.set(keys[identity.rank], card)
    store.wait(keys)
    ranks_of: dict[str, list[int]] = {}
    for rank, name in enumerate(cast("Any", store).multi_get(keys)):  # missing in torch's type stub
        ranks_of.setdefault(name.decode(), []).append(rank)
    name, ranks = next(((name, ranks) for name, ranks in ranks_of.items() if len(ranks) > 1), ("", []))
    if not ranks:
        return
    raise RunError.of(
        code="WORLD_CARD_SHARED",
        key="cluster.gpus_per_node",
        message=f"{name_ranks(ranks)} have the same card, {name}: the launcher shows each of them this one alone, and "
        "NCCL takes one rank for a card",
        fix="Ask for a card for each rank: `srun --gpus-per-task=1`, or all cards of the node for all its ranks: `srun --gpus-per-node=N`; "
        "under mpirun set CUDA_VISIBLE_DEVICES to the local rank of each process, or leave it out",
    )
