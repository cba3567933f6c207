"""Gradients that a stage sums between its passes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from staged_models import batch, dense_model
from torch import nn

from toolkit.pipeline_parallel import StageSpec, forward_stage, hidden_shape, split_model
from toolkit.pipeline_parallel.grads import Fp32GradAccumulator
from toolkit.pipeline_parallel.zero_bubble_backward import run_weight_backward, split_backward

MIDDLE = StageSpec(chunks=(range(1, 3),), num_layers=4)


MICRO_BATCHES = 2


def middle_stage(name: str) -> Any:
    model = dense_model(name)
    split_model(model, MIDDLE)
    return model


def received(model: Any, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What the stage before and the one behind send for a micro-batch."""
    generator = torch.Generator().manual_seed(micro_batch)
    hidden_BSD, gradient_BSD = (torch.randn(hidden_shape(model, batch("plain")), generator=generator) for _ in range(2))
    return hidden_BSD, gradient_BSD


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def test_sums_in_fp32_take_what_has_waited() -> None:
    whole = middle_stage("llama").to(torch.bfloat16)
    split = copy.deepcopy(whole)
    sums = [Fp32GradAccumulator(model.parameters()) for model in (whole, split)]
    gradients = split_backward(split)
    for model, own, waits in ((whole, sums[0], None), (split, sums[1], gradients)):
        for micro_batch in range(MICRO_BATCHES):
            hidden_BSD, gradient_BSD = (tensor.to(torch.bfloat16) for tensor in received(model, micro_batch))
            output = forward_stage(model, {"input_ids": batch("plain")["input_ids"]}, received=hidden_BSD)
            if waits is None:
                output.backward(gradient_BSD)
            else:
                with waits.defer() as left:
                    output.backward(gradient_BSD)
                run_weight_backward(left, own)
        own.settle()
    torch.testing.assert_close(gradients_of(split), gradients_of(whole))
