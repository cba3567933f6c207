"""Tells DeepSpeed which parameters of a stage count in the gradient norm, each number of the model once."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from toolkit.distributed.world import World


def mark_stage(model: nn.Module, *, world: World, copies: Collection[str] = ()) -> None:
    """Mark what this rank counts: all that its stage holds and other stages do not.

    DeepSpeed's ZeRO-3 counts what is unmarked on the first rank of a model alone, its ZeRO-1 and 2 on the first tensor rank of
    each stage. Tensor ranks have marked their shards before.

    Args:
        model: This rank's stage.
        world: This rank's place.
        copies: Names of parameters that another stage holds too and counts.

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
