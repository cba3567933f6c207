"""Marks for DeepSpeed of the parameters of a stage in the gradient norm, so that each element of the model counts once."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from toolkit.distributed.world import World


def mark_stage(model: nn.Module, *, world: World, copies: Collection[str] = ()) -> None:
    """Mark the parameters that this rank counts: all of its stage that no other stage counts.

    DeepSpeed's ZeRO-3 counts unmarked parameters only on the first rank of a model, ZeRO-1 and 2 on the first tensor rank of
    each stage. The shards of tensor ranks are already marked.

    Args:
        model: This rank's stage.
        world: Groups of this rank and its position in them.
        copies: Names of parameters that another stage has too and counts.

    Source:
        deepspeed runtime/utils.py is_model_parallel_parameter; zero/stage_1_and_2.py and zero/stage3.py get_grad_norm_direct.
    """
    for name, parameter in model.named_parameters():
        marked: dict[str, bool] = {}
        if name in copies:
            marked = {"ds_pipe_replicated": True, "model_parallel": False, "tensor_model_parallel": False}
        elif world.coordinate.tp == 0:
            marked = {"model_parallel": True}
        for attribute, value in marked.items():
            setattr(parameter, attribute, value)
