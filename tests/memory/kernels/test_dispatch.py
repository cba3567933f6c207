"""Which attention kernel runs on which card, and what the stand-ins keep."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from traced_models import H100, peaks, traced

from toolkit.memory.kernels.device import Device
from toolkit.memory.kernels.dispatch import choose_kernel, cuda_kernels

T4, A100, A10, L40S, H100_CARD, B200, RTX_5090 = 7.5, 8.0, 8.6, 8.9, 9.0, 10.0, 12.0
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def shapes(*, dtype=BF16, heads=8, kv_heads=8, width=128, value_width=None, length=16, kv_length=16):
    return (
        torch.empty(1, heads, length, width, dtype=dtype, device="meta"),
        torch.empty(1, kv_heads, kv_length, width, dtype=dtype, device="meta"),
        torch.empty(1, kv_heads, kv_length, value_width or width, dtype=dtype, device="meta"),
    )


def chosen(capability, *, masked=False, dropout=0.0, **sizes):
    mask = torch.empty(1, 1, 16, 16, dtype=torch.bool, device="meta") if masked else None
    return choose_kernel(*shapes(**sizes), mask, device=Device(capability=capability), dropout=dropout)


@pytest.mark.parametrize(
    ("capability", "kernel"),
    [(H100_CARD, "cudnn"), (B200, "cudnn"), (A100, "flash"), (A10, "flash"), (L40S, "flash"), (RTX_5090, "flash")],
)
def test_plain_half_precision_runs_a_fused_kernel(capability, kernel):
    assert chosen(capability) == kernel
    assert chosen(capability, kv_heads=2) == kernel, "grouped queries need no copies"


@pytest.mark.parametrize(("capability", "kernel"), [(H100_CARD, "cudnn"), (A100, "efficient"), (A10, "efficient")])
def test_a_mask_rules_flash_out(capability, kernel):
    assert chosen(capability, masked=True) == kernel


@pytest.mark.parametrize("capability", [A100, H100_CARD])
def test_a_bias_with_the_heads_last_runs_the_math_kernel(capability):
    bias = torch.empty(1, 16, 16, 8, dtype=BF16, device="meta").permute(0, 3, 1, 2)
    device = Device(capability=capability)
    assert choose_kernel(*shapes(), bias, device=device) == "math"
    assert choose_kernel(*shapes(), bias.contiguous(), device=device) != "math"


def test_constructors_of_tensors_stay_torchs_own():
    """torch remembers those that it finds when a device context is first used (torch/utils/_device.py _device_constructors)."""
    names = ("empty", "zeros", "ones", "full", "arange", "tensor")
    before = [getattr(torch, name) for name in names]
    with cuda_kernels(Device(capability=9.0)):
        assert [getattr(torch, name) for name in names] == before


def test_before_ampere_grouped_queries_run_the_math_kernel():
    assert chosen(T4, dtype=FP16) == "efficient"
    assert chosen(T4, dtype=FP16, kv_heads=2) == "math"
    assert chosen(T4, dtype=BF16) == "math"


@pytest.mark.parametrize("capability", [T4, A100, H100_CARD])
def test_fp32_has_no_flash_and_no_grouped_queries(capability):
    assert chosen(capability, dtype=FP32) == "efficient"
    assert chosen(capability, dtype=FP32, kv_heads=2) == "math"


def test_wide_heads():
    assert chosen(H100_CARD, width=256) == "flash"
    assert chosen(H100_CARD, width=256, masked=True) == "efficient"
    assert chosen(H100_CARD, width=264) == "efficient"
    assert chosen(H100_CARD, width=264, kv_heads=2) == "math"


def test_consumer_cards_have_too_little_shared_memory_for_some_widths():
    assert [chosen(A10, width=width) for width in (192, 224, 256)] == ["flash", "efficient", "flash"]
    assert chosen(A10, width=256, dropout=0.1) == "efficient"
    assert [chosen(A100, width=width) for width in (192, 224, 256)] == ["flash", "flash", "flash"]


def test_latent_attention_has_narrower_values():
    assert chosen(H100_CARD, width=192, value_width=128) == "cudnn"
    assert chosen(A100, width=192, value_width=128) == "efficient"


def test_widths_that_are_not_aligned():
    assert chosen(H100_CARD, width=60) == "flash"
    assert chosen(A100, width=60, masked=True) == "math"
    assert chosen(A100, width=60, masked=True, dtype=FP32) == "efficient"


def test_cudnn_draws_dropout_in_sixteenths():
    assert chosen(H100_CARD, dropout=0.125) == "cudnn"
    assert chosen(H100_CARD, dropout=0.1) == "flash"


def test_flash_needs_as_many_queries_as_keys_under_a_causal_flag():
    query, key, value = shapes(length=8)
    assert choose_kernel(query, key, value, None, device=Device(capability=A100)) == "efficient"
    assert choose_kernel(query, key, value, None, device=Device(capability=A100), causal=False) == "flash"


def test_a_card_without_fused_kernels_keeps_every_score():
    fused, plain = traced("llama"), traced("llama", device=Device(capability=0.0))
    assert peaks(plain)["forward"] > 1.5 * peaks(fused)["forward"]


def fake_attention(**sizes):
    return [torch.empty(tensor.shape, dtype=tensor.dtype, requires_grad=True) for tensor in shapes(**sizes)]


def saved_bytes(output):
    """Bytes that the node of an output keeps, each storage once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in output.grad_fn.saved_tensors}
    return sum(storage.nbytes() for storage in storages.values())


def test_fused_attention_keeps_inputs_output_and_log_sum_exp():
    with FakeTensorMode(), cuda_kernels(H100):
        query, key, value = fake_attention(kv_heads=2)
        out = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        assert out.shape == query.shape
        assert saved_bytes(out) == 2 * query.nbytes + key.nbytes + value.nbytes + 4 * 8 * 16


def test_a_boolean_mask_becomes_a_bias_in_the_type_of_the_query():
    with FakeTensorMode(), cuda_kernels(H100):
        query, key, value = fake_attention()
        mask = torch.empty(1, 1, 16, 16, dtype=torch.bool)
        without = saved_bytes(functional.scaled_dot_product_attention(query, key, value))
        assert saved_bytes(functional.scaled_dot_product_attention(query, key, value, mask)) == without + 2 * 16 * 16


def test_a_learned_bias_gets_a_gradient_of_its_own_shape():
    with FakeTensorMode(), cuda_kernels(H100):
        query, key, value = fake_attention()
        bias = torch.empty(1, 1, 16, 16, dtype=BF16, requires_grad=True)
        functional.scaled_dot_product_attention(query, key, value, bias).sum().backward()
        assert bias.grad.shape == bias.shape


def test_gradients_have_the_shapes_of_what_they_are_of():
    with FakeTensorMode(), cuda_kernels(H100):
        inputs = fake_attention(kv_heads=2)
        functional.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True).sum().backward()
        assert [tensor.grad.shape for tensor in inputs] == [tensor.shape for tensor in inputs]


def test_dropout_keeps_one_byte_an_element():
    with FakeTensorMode(), cuda_kernels(H100):
        hidden = torch.empty(4, 8, dtype=BF16, requires_grad=True)
        assert saved_bytes(functional.dropout(hidden, 0.5)) == 32
        assert functional.dropout(hidden, 0.0) is hidden
        assert functional.dropout(hidden, 0.5, training=False) is hidden


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_grouped_products_run_in_every_precision(dtype):
    with FakeTensorMode(), cuda_kernels(H100):
        rows = torch.empty(16, 32, dtype=dtype, requires_grad=True)
        weights = torch.empty(4, 32, 64, dtype=dtype, requires_grad=True)
        out = functional.grouped_mm(rows, weights, offs=torch.empty(4, dtype=torch.int32))
        out.backward(torch.empty_like(out))
        assert (out.shape, rows.grad.shape, weights.grad.shape) == ((16, 64), rows.shape, weights.shape)
