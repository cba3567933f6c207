"""Shards of FSDP2 as they are allocated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from toolkit.modeling.fsdp2 import allocate_shards, places_of


def test_a_tied_weight_is_allocated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = nn.ModuleDict(
            {"embed": nn.Embedding(8, 4), "norm": nn.LayerNorm(4), "head": nn.Linear(4, 8, bias=False)}
        )
    model["head"].weight = model["embed"].weight
    made: list[tuple[int, ...]] = []

    def empty_like(tensor: torch.Tensor, *, real: Any = torch.empty_like, **options: Any) -> torch.Tensor:
        made.append(tuple(tensor.shape))
        return real(tensor, **options)  # type: ignore[no-any-return]

    monkeypatch.setattr(torch, "empty_like", empty_like)
    allocate_shards(model, device=torch.device("cpu"), ties={"head.weight": "embed.weight"}, places=places_of(model))
    assert sorted(made) == [(4,), (4,), (8, 4)]
    assert model["head"].weight is model["embed"].weight
    assert not any(weight.is_meta for weight in model.parameters())
