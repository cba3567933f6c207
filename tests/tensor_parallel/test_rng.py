"""Dropout on shards differs between ranks, outside it agrees, and a checkpointed layer draws the same again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_distributed
from torch import nn
from torch.utils.checkpoint import checkpoint

from toolkit.tensor_parallel.rng import TensorParallelRNG, shard_dropout

RANKS = 2


class Layer(nn.Module):
    """Dropout on shards, then dropout on the whole: what an attention does. Linear layers that change nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.column, self.row = nn.Identity(), nn.Identity()
        self.inside: list[torch.Tensor] = []
        self.outside: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(self.column(x), 0.5, self.training)
        self.inside.append(x.detach())
        x = nn.functional.dropout(self.row(x), 0.5, self.training)
        self.outside.append((x != 0).detach() | (self.inside[-1] == 0))
        self.common = torch.rand(64)
        return x * x


def scenes(rank: int) -> dict[str, Any]:
    group = dist.group.WORLD
    torch.manual_seed(7)
    layer = Layer()
    shard_dropout(layer, columns=[layer.column], row=layer.row, tp_group=group)
    x = torch.ones(64, requires_grad=True)
    facts: dict[str, Any] = {}
    for reentrant in (False, True):
        layer.inside.clear()
        y = checkpoint(layer, checkpoint(layer, x, use_reentrant=reentrant), use_reentrant=reentrant)
        y.sum().backward()
        first, second, again_second, again_first = layer.inside
        facts[f"run again, reentrant={reentrant}"] = torch.equal((first != 0), (again_first != 0)) and torch.equal(
            (second != 0), (again_second != 0)
        )
        facts[f"layers differ, reentrant={reentrant}"] = not torch.equal(first != 0, second != 0)
    facts["inside"], facts["common"] = (first != 0).tolist(), layer.common.tolist()
    torch.manual_seed(7)
    layer.eval()
    before = torch.get_rng_state()
    layer.column(x)
    facts["evaluation draws nothing"] = torch.equal(before, torch.get_rng_state())
    region = TensorParallelRNG(group)
    region.leave()
    region.enter(x.device)
    state = torch.get_rng_state()
    region.enter(x.device)
    facts["enters once"] = torch.equal(state, torch.get_rng_state())
    region.leave()
    facts["after"] = torch.rand(4).tolist()
    return facts


@pytest.mark.gloo
def test_random_numbers_differ_inside_and_agree_outside() -> None:
    first, second = run_distributed(scenes, RANKS)
    for facts in (first, second):
        assert {name for name, held in facts.items() if held is False} == set()
    assert first["inside"] != second["inside"]
    assert 10 < sum(first["inside"]) < 54
    assert first["common"] == second["common"]
    assert first["after"] == second["after"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_card_s_generator_moves_on_and_draws_apart() -> None:
    class Rank:
        def __init__(self, number: int) -> None:
            self.rank = lambda: number

    device = torch.device("cuda")
    drawn = []
    for number in (0, 1):
        torch.cuda.manual_seed(5)
        region = TensorParallelRNG(Rank(number))  # type: ignore[arg-type]
        values = []
        for _ in range(2):
            region.enter(device)
            values.append(torch.rand(8, device=device).tolist())
            region.leave()
            values.append(torch.rand(8, device=device).tolist())
        drawn.append(values)
    assert drawn[0][0] != drawn[1][0]
    assert drawn[0][0] != drawn[0][2]
    assert drawn[0][1] == drawn[1][1] != drawn[0][3]
    assert drawn[0][3] == drawn[1][3]
