"""Backward passes in two halves give the gradients of whole ones."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from staged_models import MODELS, batch, dense_model
from torch import nn

from toolkit.pipeline_parallel import StageSpec, forward_stage, hidden_shape, split_model
from toolkit.pipeline_parallel.grads import Fp32GradAccumulator
from toolkit.pipeline_parallel.zero_bubble_backward import run_weight_backward, split_backward
from toolkit.tensor_parallel.deferred_grads import WeightGradStore

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


def run(model: Any, gradients: WeightGradStore | None, sums: Fp32GradAccumulator | None = None) -> list[torch.Tensor]:
    """Runs all micro-batches, the weights after the last where they wait; gives the gradients that are sent back."""
    sent, waiting = [], []
    for micro_batch in range(MICRO_BATCHES):
        hidden_BSD, gradient_BSD = received(model, micro_batch)
        given = {name: value for name, value in batch("plain").items() if name != "labels"}
        output = forward_stage(model, given, received=hidden_BSD)
        if gradients is None:
            output.backward(gradient_BSD)
        else:
            with gradients.defer() as left:
                output.backward(gradient_BSD)
            waiting.append(left)
        assert hidden_BSD.grad is not None
        sent.append(hidden_BSD.grad)
    for left in waiting:
        run_weight_backward(left, sums)
        assert not left
    return sent


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_two_halves_are_one_pass(name: str) -> None:
    whole = middle_stage(name)
    split = copy.deepcopy(whole)
    gradients = split_backward(split)
    torch.testing.assert_close(run(split, gradients), run(whole, None))
    found, wanted = gradients_of(split), gradients_of(whole)
    assert found.keys() == wanted.keys()
    torch.testing.assert_close(found, wanted)


def test_recomputed_layers_know_whose_gradient_waits() -> None:
    whole = middle_stage("llama").train()
    split = copy.deepcopy(whole)
    split.gradient_checkpointing_enable({"use_reentrant": False})
    run(split, split_backward(split))
    run(whole, None)
    torch.testing.assert_close(gradients_of(split), gradients_of(whole))


def test_passes_stay_whole_until_they_are_told() -> None:
    whole = middle_stage("gpt2")
    split = copy.deepcopy(whole)
    split_backward(split)
    run(split, None)
    run(whole, None)
    torch.testing.assert_close(gradients_of(split), gradients_of(whole))


def test_linear_weights_wait_and_the_rest_does_not() -> None:
    model = middle_stage("qwen2")
    gradients = split_backward(model)
    hidden_BSD, gradient_BSD = received(model, 0)
    given = {name: value for name, value in batch("plain").items() if name != "labels"}
    output = forward_stage(model, given, received=hidden_BSD)
    with gradients.defer() as waiting:
        output.backward(gradient_BSD)
    late = {name for name, weight in model.named_parameters() if weight.grad is None}
    assert late == {name for name, weight in model.named_parameters() if weight.ndim == 2}
    assert {id(weight) for left in waiting for weight in left.parameters} == {
        id(weight) for name, weight in model.named_parameters() if name in late
    }


def test_frozen_layers_and_those_summed_over_ranks_are_left_whole() -> None:
    model = middle_stage("llama")
    layer = model.model.layers[1]
    layer.self_attn.q_proj.weight.requires_grad_(False)
    layer.mlp.up_proj.weight.register_hook(lambda gradient: 2 * gradient)
    gradients = split_backward(model)
    output = forward_stage(model, {"input_ids": batch("plain")["input_ids"]}, received=received(model, 0)[0])
    with gradients.defer() as waiting:
        output.sum().backward()
    apart = {id(weight) for left in waiting for weight in left.parameters}
    assert id(layer.self_attn.q_proj.weight) not in apart
    assert id(layer.mlp.up_proj.weight) not in apart
    assert layer.mlp.up_proj.weight.grad is not None
    assert id(layer.mlp.gate_proj.weight) in apart


def test_what_waits_holds_no_graph() -> None:
    model = middle_stage("llama")
    gradients = split_backward(model)
    hidden_BSD = received(model, 0)[0]
    output = forward_stage(model, {"input_ids": batch("plain")["input_ids"]}, received=hidden_BSD)
    with gradients.defer() as waiting:
        output.sum().backward()
    seen = weakref.ref(hidden_BSD)
    del hidden_BSD, output
    assert waiting
    assert seen() is None, "the stage's input can be freed while weights wait"


def test_a_whole_model_is_refused() -> None:
    with pytest.raises(ValueError, match="not split"):
        split_backward(dense_model("llama"))
