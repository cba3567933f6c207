"""What each optimizer of DeepSpeed steps, and the names by which it is found in the installed version."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn

from toolkit.distributed.deepspeed_flats import LossScale, flats_of, saved_loss_scale, set_loss_scale

NAMES: dict[type, set[str]] = {
    DeepSpeedZeroOptimizer: {"single_partition_of_fp32_groups", "bit16_groups", "update_lp_params", "loss_scaler"},
    BF16_Optimizer: {"fp32_groups_flat_partition", "bf16_groups", "update_lp_params"},
    DeepSpeedZeroOptimizer_Stage3: {
        "fp32_partitioned_groups_flat",
        "fp16_groups",
        "grad_position",
        "persistent_parameters",
        "_get_param_partition_rank",
        "_reassign_or_swap_out_partitioned_parameters",
        "checkpoint_event_epilogue",
    },
    FP16_Optimizer: {"fp32_groups_flat", "fp16_groups", "loss_scale_config"},
    FP16_UnfusedOptimizer: {"fp32_groups", "fp16_groups", "loss_scale_config"},
    DeepSpeedEngine: {"global_steps", "skipped_steps", "global_samples"},
}


@pytest.mark.parametrize("kind", NAMES)
def test_what_is_private_is_still_there(kind: type) -> None:
    used = {name for value in vars(kind).values() for name in getattr(getattr(value, "__code__", None), "co_names", ())}
    assert NAMES[kind] <= used | set(vars(kind))


def _engine(optimizer: Any) -> Any:
    return SimpleNamespace(optimizer=SimpleNamespace(**optimizer))


def test_flat_copies_of_whole_weights_are_one_after_the_other_and_the_weights_follow() -> None:
    """FusedAdam in 16 bit at stage 0, which needs a card."""
    weights = [
        nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16)),
        nn.Parameter(torch.zeros(4, dtype=torch.bfloat16)),
    ]
    copy = torch.zeros(10)
    engine = _engine({"fp32_groups_flat": [copy], "fp16_groups": [weights], "optimizer": None})
    for flat in flats_of(engine):
        assert flat.stepped is copy
        assert [(piece.start, piece.stop, piece.at) for piece in flat.pieces] == [(0, 6, 0), (0, 4, 6)]
        copy.copy_(torch.arange(10.0) + 1 / 512)
    assert weights[0].flatten().tolist() == [1 / 512, 1, 2, 3, 4, 5], "rounded to 8 bits"
    assert weights[1].tolist() == [6, 7, 8, 9]


def test_the_state_of_a_loss_scaler_goes_over_to_another_wrapper() -> None:
    scaler = DynamicLossScaler(2.0**16, 1000, 1, 2, False)
    scaler.cur_scale, scaler.cur_iter, scaler.last_overflow_iter, scaler.cur_hysteresis = 512.0, 7, 3, 1
    saved = saved_loss_scale({"loss_scaler": scaler, "dynamic_loss_scale": True})
    assert saved == LossScale(scale=512.0, iteration=7, last_overflow=3, hysteresis=1)
    other = DynamicLossScaler(2.0**16, 1000, 1, 2, False)
    set_loss_scale(_engine({"loss_scaler": other, "dynamic_loss_scale": True}), saved)
    assert vars(other) == vars(scaler)
    config = SimpleNamespace(dynamic_loss_scale=True, cur_scale=2.0**16, cur_iter=0, last_overflow_iter=-1)
    set_loss_scale(_engine({"loss_scale_config": config}), saved)
    assert (config.cur_scale, config.cur_iter, config.last_overflow_iter) == (512.0, 7, 3)
    back = saved_loss_scale({"dynamic_loss_scale": True, "cur_scale": 512.0, "cur_iter": 7, "last_overflow_iter": 3})
    assert back == LossScale(scale=512.0, iteration=7, last_overflow=3)
    assert saved_loss_scale({"dynamic_loss_scale": False, "cur_scale": 1.0}) is None
    fixed = SimpleNamespace(dynamic_loss_scale=False, cur_scale=128.0)
    set_loss_scale(_engine({"loss_scale_config": fixed}), saved)
    assert fixed.cur_scale == 128.0
