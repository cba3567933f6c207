"""What Liger's kernels keep and allocate, and that a trace replaces the modules which training replaces."""

from __future__ import annotations

import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from traced_models import H100, peaks, traced

from toolkit.memory.kernels.dispatch import cuda_kernels
from toolkit.memory.kernels.fake_liger import functions_stand_in
from toolkit.modeling import liger

T, D, F, P = 8, 16, 24, 132
BF16 = torch.bfloat16


def saved_bytes(output, *given):
    """Bytes that the node of an output keeps, each storage once, without those of `given`."""
    known = {tensor.untyped_storage()._cdata for tensor in given}
    found = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in output.grad_fn.saved_tensors}
    return sum(storage.nbytes() for key, storage in found.items() if key not in known)


def test_a_norm_keeps_its_input_and_one_fp32_value_a_row():
    with FakeTensorMode():
        x, weight = (torch.empty(shape, dtype=BF16, requires_grad=True) for shape in ((T, D), (D,)))
        out = functions_stand_in(num_multiprocessors=P).rms_norm(x, weight, 1e-6, 0.0, "llama", False)
        assert (out.shape, out.dtype) == (x.shape, x.dtype)
        assert saved_bytes(out, x, weight) == 4 * T
        out.sum().backward()
        assert [x.grad.shape, weight.grad.dtype] == [x.shape, BF16]


@pytest.mark.parametrize("name", ["silu_product", "gelu_product"])
def test_a_gated_product_keeps_its_inputs_and_writes_the_gradients_over_them(name):
    with FakeTensorMode():
        gate, up = (torch.empty((T, F), dtype=BF16, requires_grad=True) for _ in range(2))
        product = getattr(functions_stand_in(num_multiprocessors=P), name)(gate * 1, up * 1)
        saved = [tensor.untyped_storage()._cdata for tensor in product.grad_fn.saved_tensors]
        gradients = product.grad_fn.apply(torch.empty_like(product))
        assert [tensor.untyped_storage()._cdata for tensor in gradients] == saved


def test_a_product_of_joined_halves_has_a_gradient_of_its_own():
    with FakeTensorMode():
        both = torch.empty((T, 2 * F), dtype=BF16, requires_grad=True)
        product = functions_stand_in(num_multiprocessors=P).joined_silu_product(both)
        assert product.shape == (T, F)
        product.sum().backward()
        assert both.grad.shape == both.shape
        assert both.grad.untyped_storage()._cdata != both.untyped_storage()._cdata


@pytest.mark.parametrize("architecture", ["llama", "phi3", "mixtral"])
def test_a_trace_runs_the_kernels_without_the_package(architecture, monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    eager, fused = traced(architecture), traced(architecture, kernels="liger")
    assert peaks(fused)["forward"] < peaks(eager)["forward"]
    assert [parameter.name for parameter in fused.parameters] == [parameter.name for parameter in eager.parameters]


@pytest.mark.full
@pytest.mark.parametrize("way", ["checkpointing", "half of the layers checkpointed", "LoRA", "LoRA with checkpointing"])
def test_few_layers_represent_all_with_them(way):
    few, all_layers = (traced("llama", way, kernels="liger", all_layers=every) for every in (False, True))
    assert peaks(few) == peaks(all_layers)
    assert peaks(few)["forward"] <= peaks(traced("llama", way))["forward"]


def test_the_package_is_asked_for_again_outside_of_a_trace(monkeypatch):
    kept = liger.fused_functions
    with cuda_kernels(H100):
        assert liger.fused_functions is not kept
    assert liger.fused_functions is kept
