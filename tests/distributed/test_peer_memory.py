"""Messages between two cards arrive in order and whole, in both directions at once, also those too large for the mailboxes."""

from __future__ import annotations

import pytest
import torch
from ranks import run_on_cards

NUM_MESSAGES = 7
CAPACITY = 4 * 2**20


def exchange(rank: int, wraps: bool) -> tuple[bool, list[float]]:
    """Send messages ahead of the other end, of which the third is too large, and return what came, in the order of arrival."""
    import torch

    from toolkit.distributed.p2p import P2PChannels
    from toolkit.distributed.world import destroy_world, init_world
    from toolkit.topology.grid import Grid

    world = init_world(Grid(pp=2), backend="nccl")
    channels = P2PChannels(world.grid, rank, device=world.device, wraps=wraps, max_bytes=CAPACITY)
    other = 1 - rank
    kinds = ("activation", "gradient") if wraps else (("activation",) if rank == 0 else ("gradient",))
    arriving = ("activation", "gradient") if wraps else (("gradient",) if rank == 0 else ("activation",))
    sizes = [2**20 if number != 2 else 2**22 for number in range(NUM_MESSAGES)]
    like, came = torch.empty(0, device=world.device), []
    for number, size in enumerate(sizes):
        pending = [channels.receive((size,), kind, source=other, like=like) for kind in arriving]
        for kind in kinds:
            torch.cuda._sleep(10_000_000 * (1 + (number + rank) % 2))
            channels.send(torch.full((size,), 100.0 * rank + number, device=world.device), kind, to=other)
        for each in pending:
            tensor = each.wait()
            came += [float(tensor.min()), float(tensor.max())]
    channels.finish()
    used = bool(channels._mailboxes)
    destroy_world(world)
    return used, came


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("wraps", [False, True])
def test_what_one_card_sends_the_other_receives(wraps: bool) -> None:
    ranks = run_on_cards(exchange, 2, wraps, num_cards=2, timeout_seconds=120)
    for rank, (used, came) in enumerate(ranks):
        assert used == torch.cuda.can_device_access_peer(0, 1)
        repeats = 4 if wraps else 2
        assert came == [100.0 * (1 - rank) + number for number in range(NUM_MESSAGES) for _ in range(repeats)]
