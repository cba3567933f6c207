"""The card of a rank: that of its local rank's number, or the only one that a scheduler shows it."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch.distributed import TCPStore

from toolkit.distributed.device import check_own_cards
from toolkit.errors import RunError
from toolkit.launch.identity import WorkerIdentity
from toolkit.launch.ports import free_port


def shown(cards: list[str]) -> list[RunError | None]:
    """Compare the cards of ranks, each with a connection of its own to one store."""
    host = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def rank(number: int) -> RunError | None:
        store = TCPStore("127.0.0.1", host.port, is_master=False, timeout=timedelta(seconds=20))
        identity = WorkerIdentity(rank=number, local_rank=number, world_size=len(cards), launcher="slurm")
        try:
            check_own_cards(store, identity, cards[number])
        except RunError as error:
            return error
        return None

    with ThreadPoolExecutor(len(cards)) as ranks:
        return list(ranks.map(rank, range(len(cards))))


def test_ranks_that_were_shown_one_card_end_together():
    assert shown(["a/GPU-1", "a/GPU-2", "b/GPU-1"]) == [None] * 3
    found = shown(["a/GPU-1", "a/GPU-2", "a/GPU-1"])
    assert [error is not None and error.codes for error in found] == [("WORLD_CARD_SHARED",)] * 3
    assert "ranks 0, 2 have the same card, a/GPU-1" in str(found[1])


_RANK = """
import os, torch, torch.distributed as dist
from toolkit.distributed.world import init_world
from toolkit.topology.grid import Grid
world = init_world(Grid(dp=2), backend="nccl")
total = torch.ones(1, device=world.device)
dist.all_reduce(total)
print("FOUND", world.device, os.environ["LOCAL_RANK"], total.item())
"""


def srun(visible: list[str]) -> list[str]:
    """Start two ranks with the variables that srun sets, and each with cards of its own; return what they print."""
    around = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0", "SLURM_JOB_ID": "7"}
    step |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK],
            env=around | step | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "CUDA_VISIBLE_DEVICES": cards},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, cards in enumerate(visible)
    ]
    return [rank.communicate(timeout=300)[0] for rank in ranks]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_each_rank_of_srun_uses_the_only_card_that_it_sees():
    assert all("FOUND cuda:0 0 2.0" in said for said in srun(["0", "1"]))
    assert [("FOUND cuda:0 0 2.0" in a, "FOUND cuda:1 1 2.0" in b) for a, b in [srun(["0,1", "0,1"])]] == [(True, True)]
    assert all("WORLD_CARD_SHARED" in said for said in srun(["1", "1"]))
