"""Linear modules as ZeRO-3 runs them: values, gradients and what is kept are those of DeepSpeed's own function."""

import pytest
import torch
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from torch.nn import functional

from toolkit.memory.engines.settings import EngineSettings
from toolkit.memory.kernels.zero3 import linear_modules


def run(linear, *, frozen, bias):
    """Return the output, the gradients and the shapes of what was kept for them."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2, 3, 8, generator=generator, requires_grad=True)
    weight = torch.randn(5, 8, generator=generator).requires_grad_(not frozen)
    offset = torch.randn(5, generator=generator).requires_grad_(not frozen) if bias else None
    kept = []

    def keep(tensor):
        kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = linear(values, weight, offset)
    (out * torch.arange(out.numel()).reshape(out.shape)).sum().backward()
    gradients = [tensor.grad for tensor in (values, weight, offset) if tensor is not None]
    return out, gradients, set(kept)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_it_computes_and_keeps_what_deepspeed_does(frozen, bias):
    with linear_modules(zero3=True):
        out, gradients, kept = run(functional.linear, frozen=frozen, bias=bias)
    expected, expected_gradients, expected_kept = run(zero3_linear_wrap, frozen=frozen, bias=bias)
    assert torch.equal(out, expected)
    for gradient, reference in zip(gradients, expected_gradients, strict=True):
        assert (gradient is None) == (reference is None)
        assert gradient is None or torch.allclose(gradient, reference)
    assert (2, 3, 8) in kept
    assert kept == expected_kept - {(5,)}  # the bias lives anyway


def test_without_zero3_a_frozen_weight_keeps_no_input_even_after_an_engine_of_stage_3(monkeypatch):
    monkeypatch.setattr(functional, "linear", zero3_linear_wrap)  # as DeepSpeed leaves it
    with linear_modules(zero3=False):
        assert (2, 3, 8) not in run(functional.linear, frozen=True, bias=False)[2]
    assert functional.linear is zero3_linear_wrap


@pytest.mark.parametrize(
    ("zero", "contiguous"),
    [
        ({"stage": 2, "contiguous_gradients": False}, False),
        ({"stage": 2, "contiguous_gradients": False, "offload_optimizer": {"device": "cpu"}}, True),
        ({"stage": 1, "contiguous_gradients": False, "offload_optimizer": {"device": "none"}}, False),
        ({"stage": 3, "contiguous_gradients": False, "offload_optimizer": {"device": "cpu"}}, False),
    ],
)
def test_offload_makes_gradients_contiguous_in_the_lower_stages(zero, contiguous):
    config = {"zero_optimization": zero, "bf16": {"enabled": True}}
    assert EngineSettings.read(config, dp_size=1).contiguous_gradients is contiguous
