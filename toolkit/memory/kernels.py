"""Stand-ins for CUDA kernels whose CPU counterparts save other tensors for the backward pass.

A trace runs on fake CPU tensors. Where the CPU kernel keeps something else than the CUDA one, the trace runs one of
the functions below instead: they allocate, save and release what the CUDA kernel does, and compute nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn import functional
from transformers import AttentionInterface, masking_utils
from transformers.masking_utils import AttentionMaskInterface

Kernel = Literal["flash", "cudnn", "efficient", "math"]

# Attention implementation under which FlashAttention-2 is traced: transformers would ask for the package itself.
TRACED_FLASH = "toolkit_traced_flash"

# aten/src/ATen/native/transformers/cuda/sdp_utils.cpp check_flash_attention_hardware_support, check_head_dim_size_flash.
FLASH_MIN_CAPABILITY = 8.0
FLASH_MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What of a card decides which attention kernel runs.

    Args:
        capability: CUDA compute capability, such as 9.0; 0 for a card that has none of CUDA's fused kernels.
    """

    capability: float


class _FusedAttention(torch.autograd.Function):
    """Flash, cuDNN and memory-efficient attention: all save q, k, v, the output and the log-sum-exp.

    Source:
        aten/src/ATen/native/transformers/cuda/attention.cu and attention_backward.cu (torch 2.11).
    """

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: Any, kernel: str) -> Any:
        shape = (*query.shape[:-1], value.shape[-1])
        out = _like_layout(query, shape)
        logsumexp = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, logsumexp, *([bias] if bias is not None else []))
        ctx.kernel = kernel
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        query, key, value, out = ctx.saved_tensors[:4]
        grad_query, grad_key, grad_value = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        if ctx.kernel == "flash":
            # flash_api.cpp mha_bwd: softmax_d and dq_accum in fp32; dk and dv of every query head before their sum.
            work = [
                query.new_empty(query.shape, dtype=torch.float32),
                out.new_empty(out.shape[:-1], dtype=torch.float32),
            ]
            if key.shape[1] != query.shape[1]:
                work += [key.new_empty(query.shape), value.new_empty(out.shape)]
            del work
        return grad_query, grad_key, grad_value, None, None


def _like_layout(query: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Allocates an output in the order in which the query lies (cudnn/MHA.cpp alloc_with_matching_layout)."""
    order = sorted(range(len(shape)), key=query.stride, reverse=True)
    return query.new_empty([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(len(shape))])


def choose_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, *, device: Device
) -> Kernel:
    """Names the kernel that `scaled_dot_product_attention` runs on a CUDA card.

    Source:
        aten/src/ATen/native/transformers/cuda/sdp_utils.cpp use_flash_attention, use_mem_efficient_attention.
    """
    grouped = key.shape[1] != query.shape[1]
    half = query.dtype in (torch.bfloat16, torch.float16)
    width = query.shape[-1]
    plain = half and mask is None and width == value.shape[-1] <= FLASH_MAX_HEAD_DIM
    if plain and device.capability >= FLASH_MIN_CAPABILITY:
        return "flash"
    return "math" if grouped or device.capability < 5.0 else "efficient"


class _Dropout(torch.autograd.Function):
    """CUDA's native_dropout keeps a mask of one byte an element (aten/src/ATen/native/cuda/Dropout.cu)."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(torch.empty_like(hidden, dtype=torch.bool))
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(grads[0])


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    if not training or p == 0:
        return input
    return _Dropout.apply(input)  # type: ignore[no-any-return, no-untyped-call]


def _sdpa(original: Callable[..., torch.Tensor], device: Device) -> Callable[..., torch.Tensor]:
    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        kernel = choose_kernel(query, key, value, attn_mask, device=device)
        if kernel == "math":
            return torch.ops.aten._scaled_dot_product_attention_math(  # type: ignore[no-any-return]
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )[0]
        bias = attn_mask
        if bias is not None and bias.dtype == torch.bool:
            # attention.cpp convert_boolean_attn_mask: the kernel adds a bias in the query's type.
            bias = torch.empty_like(bias, dtype=query.dtype)
        return _FusedAttention.apply(query, key, value, bias, kernel)  # type: ignore[no-any-return, no-untyped-call]

    return attend


def _flash_attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **_: Any
) -> tuple[torch.Tensor, None]:
    """FlashAttention-2 reads q, k, v as (batch, sequence, heads, width) and writes the same."""
    out = _FusedAttention.apply(query, key, value, None, "flash")  # type: ignore[no-untyped-call]
    return out.transpose(1, 2).contiguous(), None


@contextlib.contextmanager
def cuda_kernels(device: Device, *, packed: bool = False) -> Iterator[None]:
    """Runs attention, its masks and dropout as a CUDA card would.

    Args:
        device: The card.
        packed: Whether documents are kept apart inside a row, so that a mask is always needed.
    """
    attention, dropout = functional.scaled_dot_product_attention, functional.dropout
    find_packed = masking_utils.find_packed_sequence_indices
    AttentionInterface.register(TRACED_FLASH, _flash_attention)
    AttentionMaskInterface.register(TRACED_FLASH, lambda *_, **__: None)
    if not packed:
        # On real positions it finds one document and gives None; it cannot read fake ones, and assumes several.
        masking_utils.find_packed_sequence_indices = lambda position_ids: None
    functional.scaled_dot_product_attention = _sdpa(attention, device)
    functional.dropout = _dropout
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = attention
        functional.dropout = dropout
        masking_utils.find_packed_sequence_indices = find_packed
