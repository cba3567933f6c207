"""The weights of a live run, as its ranks hold them together."""

from __future__ import annotations

from typing import Any

import torch

from toolkit.tensor_parallel.apply import parameter_shards


def dense_state(run: Any) -> dict[str, torch.Tensor]:
    """What the data-parallel and tensor ranks of this rank's stage hold together, whole and by name."""
    import deepspeed

    shards, state = parameter_shards(run.model), {}
    for name, weight in run.model.named_parameters(remove_duplicate=False):
        with deepspeed.zero.GatheredParameters([weight], enabled=hasattr(weight, "ds_id")):
            own = weight.detach().clone()
        state[name] = shards[name].gather(own, tp_group=run.world.tp_group) if name in shards else own
    return state
